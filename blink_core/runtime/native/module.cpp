// Python module `blink_core._native`: the host build of the scheduler and the acquire/release words of the rings.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include <map>
#include <string>

#include "explore_module.hpp"
#include "lockstep.hpp"
#include "loop.hpp"

namespace nb = nanobind;
using namespace blink;

namespace {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

uint64_t checksum(nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> words) {
  uint64_t sum = 0;
  for (size_t i = 0; i < words.shape(0); ++i) sum += mix_word(words.data()[i], i);
  return sum;
}

// Waits until the word at `address` differs from `old`; returns its value, which is `old` after `timeout_us`.
uint64_t wait_word(uintptr_t address, uint64_t old, uint64_t timeout_us, uint64_t spin_us) {
  nb::gil_scoped_release release;
  const uint64_t* word = pointer<const uint64_t>(address);
  uint64_t value = load_acquire(word);
  if (value != old) return value;
  const auto deadline = Clock::now() + std::chrono::microseconds(timeout_us);
  prctl(PR_SET_TIMERSLACK, 1000UL);
  Backoff backoff(std::chrono::microseconds(spin_us), std::chrono::microseconds(20));
  while (Clock::now() < deadline) {
    value = load_acquire(word);
    if (value != old) break;
    backoff.wait();
  }
  return value;
}

// Direct calls and the scheduler thread would race for the same state.
Scheduler& idle(Scheduler& scheduler) {
  if (scheduler.running()) throw std::logic_error("the scheduler thread runs: only it may step");
  return scheduler;
}

template <class Layout>
uint64_t nbytes(Layout layout) {
  return layout.nbytes;
}

Config read_config(nb::bytes config) {
  if (config.size() != sizeof(Config)) throw nb::value_error("config must be sizeof(Config) bytes");
  Config c;
  __builtin_memcpy(&c, config.data(), sizeof c);
  return c;
}

// Sizes of the regions as C++ computes them, to be compared with Python's.
std::map<std::string, uint64_t> region_sizes(nb::bytes config) {
  const Config c = read_config(config);
  return {{"Control", nbytes(control_layout(c))},
          {"Ring", nbytes(ring_layout(c))},
          {"State", nbytes(state_layout(c))},
          {"Log", nbytes(log_layout(c))},
          {"Plan", nbytes(plan_layout(c))}};
}

// One program of lockstep.hpp on a fresh engine: int64 words in, int64 words of records out, as bytes.
nb::bytes run_lockstep(nb::bytes config, nb::bytes program, uint32_t group_size) {
  const Config c = read_config(config);
  if (program.size() % sizeof(int64_t)) throw nb::value_error("program must be whole 64-bit words");
  std::vector<int64_t> words(program.size() / sizeof(int64_t)), records;
  __builtin_memcpy(words.data(), program.data(), program.size());
  {
    nb::gil_scoped_release release;
    records = Lockstep(c, group_size).run(words.data(), words.size());
  }
  return nb::bytes(records.data(), records.size() * sizeof(int64_t));
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Host build of Blink's scheduler and ring words.";
  nb::set_leak_warnings(false);  // signal handlers hold a runtime until the process ends
  m.def("load_acquire", [](uintptr_t a) { return load_acquire(pointer<const uint64_t>(a)); }, nb::arg("address"));
  m.def("store_release", [](uintptr_t a, uint64_t v) { store_release(pointer<uint64_t>(a), v); }, nb::arg("address"),
        nb::arg("value"));
  m.def("wait_word", &wait_word, nb::arg("address"), nb::arg("old"), nb::arg("timeout_us"), nb::arg("spin_us") = 50);
  m.def("checksum", &checksum, nb::arg("words"));
  m.def("region_sizes", &region_sizes, nb::arg("config"));
  m.def("run_lockstep", &run_lockstep, nb::arg("config"), nb::arg("program"), nb::arg("group_size") = 1);
  explore::bind(m);

  nb::class_<Scheduler>(m, "Scheduler")
      .def(
          "__init__",
          [](Scheduler* self, uintptr_t shared, uintptr_t state, uintptr_t log, uintptr_t plan, uint32_t group_size) {
            new (self) Scheduler(pointer<uint8_t>(shared), pointer<uint8_t>(state), pointer<uint8_t>(log),
                                 pointer<uint8_t>(plan), group_size);
          },
          nb::arg("shared"), nb::arg("state"), nb::arg("log"), nb::arg("plan"), nb::arg("group_size") = 1)
      .def("init", [](Scheduler& self) { idle(self).init(); })
      .def("boundary", [](Scheduler& self, uint64_t now) { return idle(self).boundary(now); }, nb::arg("now_us") = 0)
      .def("poll", [](Scheduler& self, uint64_t now) { return idle(self).poll(now); }, nb::arg("now_us") = 0)
      .def(
          "start", [](Scheduler& self, uint32_t grace_ms) { self.start(std::chrono::milliseconds(grace_ms)); },
          nb::arg("stop_grace_ms") = 10000)
      .def_prop_ro("steady_boundaries", &Scheduler::steady_boundaries)
      .def("join", &Scheduler::join, nb::call_guard<nb::gil_scoped_release>())
      .def("complete", &Scheduler::complete, nb::arg("status"))
      .def(
          "wait_plan",
          [](Scheduler& self, uint32_t timeout_ms) { return self.wait_plan(std::chrono::milliseconds(timeout_ms)); },
          nb::arg("timeout_ms"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "run_noop", [](Scheduler& self, uint64_t steps) { return run_noop(idle(self), steps); }, nb::arg("steps"),
          nb::call_guard<nb::gil_scoped_release>());
}
