// Where Python comes in. Exceptions must not go out there, so a function returns what became of it: 0, a number of its
// own, or NO_MEMORY.
#pragma once

#include <cstdint>
#include <new>
#include <stdexcept>

namespace bytesplat {

constexpr int64_t NO_MEMORY = -1;  // as in cpu_library.py

// For the last handler of such a function: what to return for the exception that it caught.
inline int64_t failure() {
    try {
        throw;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    } catch (const std::length_error&) {  // longer than any memory
        return NO_MEMORY;
    }
}

}  // namespace bytesplat
