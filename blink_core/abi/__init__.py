"""The one contract between front end, scheduler and verification: enums, structs and memory regions.

`definition` is the single source; `dtypes` derives NumPy dtypes from it and `header` the C++ header
`blink_core/device/abi.hpp` (design section 3).
"""
