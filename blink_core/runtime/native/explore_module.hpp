// Python class `_native.Explorer`: verification/explore/run.py drives it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "explorer.hpp"

namespace blink::explore {

namespace nb = nanobind;

inline void bind(nb::module_& m) {
  nb::class_<Explorer>(m, "Explorer")
      .def(
          "__init__",
          [](Explorer* self, nb::bytes config, nb::bytes scope, bool symmetry) {
            if (config.size() != sizeof(Config)) throw nb::value_error("config must be sizeof(Config) bytes");
            if (scope.size() % sizeof(int64_t) != 0) throw nb::value_error("scope must be whole 64-bit words");
            Config c;
            std::memcpy(&c, config.data(), sizeof c);
            std::vector<int64_t> words(scope.size() / sizeof(int64_t));
            std::memcpy(words.data(), scope.data(), scope.size());
            new (self) Explorer(c, words.data(), words.size(), symmetry);
          },
          nb::arg("config"), nb::arg("scope"), nb::arg("symmetry") = true)
      .def(
          "run",
          [](Explorer& self, double seconds, uint64_t max_states, uint64_t max_bytes) {
            return int(self.run(seconds, max_states, max_bytes));
          },
          nb::arg("seconds"), nb::arg("max_states"), nb::arg("max_bytes"), nb::call_guard<nb::gil_scoped_release>())
      .def("analyse", &Explorer::analyse, nb::call_guard<nb::gil_scoped_release>())
      .def("violation",
           [](const Explorer& self) { return std::vector{self.violation().clause, self.violation().message}; })
      .def("witness", &Explorer::witness)
      .def("replay", &Explorer::replay, nb::arg("labels"), nb::call_guard<nb::gil_scoped_release>())
      .def("figures", &Explorer::figures)
      .def("situations", &Explorer::situations);
}

}  // namespace blink::explore
