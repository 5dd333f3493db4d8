// Structures of csrc/common whose members are all of type T, such as Shape<T>: Shape<Floats> holds a shape in each lane.
#pragma once
#include "simd.h"

#include <cstddef>

namespace bytesplat {

template <template <class> class Of> constexpr size_t MEMBERS = sizeof(Of<float>) / sizeof(float);

// The structure in one lane.
template <template <class> class Of> inline Of<float> get_lane(const Of<Floats>& lanes, int lane) {
    static_assert(sizeof(Of<Floats>) == MEMBERS<Of> * sizeof(Floats));
    Of<float> result;
    for (size_t i = 0; i < MEMBERS<Of>; ++i)
        reinterpret_cast<float*>(&result)[i] = reinterpret_cast<const Floats*>(&lanes)[i][lane];
    return result;
}

// The same structure in all lanes.
template <template <class> class Of> inline Of<Floats> spread(const Of<float>& value) {
    Of<Floats> result;
    for (size_t i = 0; i < MEMBERS<Of>; ++i)
        reinterpret_cast<Floats*>(&result)[i] = broadcast<Floats>(reinterpret_cast<const float*>(&value)[i]);
    return result;
}

}  // namespace bytesplat
