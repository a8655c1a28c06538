// What the boundary behind the step in flight needs, got together while that step runs: steady.hpp makes and uses it.
#pragma once

#include <cuda/std/bit>

#include "abi.hpp"

namespace blink {

inline constexpr uint32_t STEADY_WORDS = 4;  // of 64 rows
inline constexpr uint32_t STEADY_ROWS = 64 * STEADY_WORDS;
inline constexpr uint32_t STEADY_RINGS = 4;
inline constexpr uint32_t STEADY_MOVES = 64;

// A set of rows, the same in every member.
struct RowSet {
  uint64_t words[STEADY_WORDS];
  BLINK_FN bool has(uint32_t row) const { return (words[row / 64] >> (row % 64) & 1) != 0; }
  BLINK_FN uint32_t count(uint32_t end) const {  // of the rows before `end`
    uint32_t n = 0;
    for (uint32_t w = 0; w < STEADY_WORDS && w * 64 < end; ++w) {
      const uint32_t bits = end - w * 64;
      n += uint32_t(cuda::std::popcount(bits < 64 ? words[w] & ((uint64_t(1) << bits) - 1) : words[w]));
    }
    return n;
  }
};

// A row of the next plan but for its token, which nobody knows yet.
struct alignas(16) NextRow {
  uint64_t serial;
  uint32_t request, generation;
  uint32_t context_len, emitted, n_pages, row;  // as in PlanRow
  uint32_t page;      // that the token is written to
  uint32_t stops;     // stop ids that may end the request now, and ENDS_AT_EOS
  int32_t token;      // of the step that has ended
  float logprob;
};
inline constexpr uint32_t ENDS_AT_EOS = 1u << 31;
static_assert(sizeof(NextRow) == 48);  // runtime/serve_abi.py makes room for them

// A full page that enters the prefix cache at the boundary, or gives way to its twin there.
struct Move {
  uint64_t chain;  // hash of all tokens up to its end
  uint32_t place;  // of its row
  uint32_t index;  // in the row's block table
  uint32_t page, parent;
  int32_t twin;  // page with the same tokens, or -1
  uint32_t reserved;
};

struct NextStep {
  uint64_t step;   // the step in flight that this follows; 0: nothing is known
  uint64_t ended;  // a steady boundary took in this step, and what can wait until the next one runs is still to be done
  uint64_t epoch[STEADY_RINGS];  // acknowledged
  uint32_t ring_rows[STEADY_RINGS];
  RowSet of_ring[STEADY_RINGS];
  RowSet growing;  // rows that get a page
  uint32_t rows;   // 0: the boundary will not be steady
  uint32_t moves;
  uint32_t room;   // of `row`
  NextRow* row;
  Move move[STEADY_MOVES];
};

}  // namespace blink
