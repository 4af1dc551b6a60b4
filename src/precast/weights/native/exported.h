// The body of an exported function: no C++ exception crosses the boundary.
//
// Invariant: the caller holds the GIL (`ctypes.PyDLL`, or a built-in function), and checks Python's error indicator after
// the call.
#pragma once

#include "boundary.h"

#include <c10/util/Exception.h>

#include <type_traits>

namespace precast {

// Functions of Python's C API, by their addresses: the library needs no header of Python.
struct PythonFunctions {
  static inline void (*keep)(void*) = nullptr;
  static inline void (*drop)(void*) = nullptr;
  static inline void* (*integer)(long) = nullptr;
  static inline void* (*address)(void*) = nullptr;
  static inline void (*set_error)(void*, const char*) = nullptr;
  static inline void* none = nullptr;
  static inline void* error_type = nullptr;

  static void* new_reference(void* object) {
    keep(object);
    return object;
  }
};

// Returns the result of `body`. An exception of C++ becomes one of Python, and the result is then zero or null.
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
