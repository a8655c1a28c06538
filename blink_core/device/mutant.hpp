// Planted faults for testing the tests. A release build compiles every mutant out: BLINK_MUTANT(x) is the constant false.
#pragma once

#include "abi.hpp"

namespace blink {
enum class Mutant : uint32_t {
  NONE = 0,
  ADMIT_YOUNGEST_FIRST = 1,  // class Q: waiting requests enter at the head of their ring's list
  TOKEN_TWICE = 2,           // class R: every 13th token event is written twice
  LEAK_PAGE_ON_CANCEL = 3,   // class K: the last page of a cancelled request is forgotten
};

#if defined(BLINK_MUTANTS)
extern uint32_t active_mutant;  // set once, before the scheduler starts
#define BLINK_MUTANT(name) (::blink::active_mutant == uint32_t(::blink::Mutant::name))
#else
#define BLINK_MUTANT(name) false
#endif
}  // namespace blink
