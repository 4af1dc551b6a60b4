// Exported functions: a C++ exception in one of them becomes a Python exception.
//
// Invariant: the caller holds the GIL (`ctypes.PyDLL`, or a built-in function), and checks Python's error indicator
// after the call.
#pragma once

#include "boundary.h"

#include <c10/util/Exception.h>

#include <type_traits>

namespace precast {

// Functions and objects of Python's C API. Python sets their addresses, so that the library needs no header of Python.
struct PythonFunctions {
  static inline void (*increment_references)(void*) = nullptr;
  static inline void (*decrement_references)(void*) = nullptr;
  static inline void* (*new_integer)(long) = nullptr;
  static inline void* (*integer_as_pointer)(void*) = nullptr;
  static inline void (*set_error)(void*, const char*) = nullptr;
  static inline void* none = nullptr;
  static inline void* error_type = nullptr;

  static void* new_reference(void* object) {
    increment_references(object);
    return object;
  }
};

// Returns the result of `body`; after a C++ exception it sets a Python exception, and returns zero or null.
template <class Body>
auto guarded(const Body& body) noexcept -> decltype(body()) {
  try {
    return body();
  } catch (const c10::Error& error) {
    PythonFunctions::set_error(PythonFunctions::error_type, error.what_without_backtrace());
  } catch (const std::exception& exception) {
    PythonFunctions::set_error(PythonFunctions::error_type, exception.what());
  } catch (...) {
    PythonFunctions::set_error(PythonFunctions::error_type, "the native engine threw an exception of an unknown kind");
  }
  if constexpr (!std::is_void_v<decltype(body())>) {
    return {};
  }
}

}  // namespace precast
