// Structures of csrc/common, such as Shape<T>, whose members are all of type T: of Floats they hold one structure of floats
// in each lane.
#pragma once
#include "simd.h"

#include <cstddef>

namespace bytesplat {

template <template <class> class Of> constexpr size_t MEMBERS = sizeof(Of<float>) / sizeof(float);

template <template <class> class Of> inline Of<float> get_lane(const Of<Floats>& lanes, int lane) {
    static_assert(sizeof(Of<Floats>) == MEMBERS<Of> * sizeof(Floats));
    Of<float> result;
    for (size_t i = 0; i < MEMBERS<Of>; ++i)
        reinterpret_cast<float*>(&result)[i] = reinterpret_cast<const Floats*>(&lanes)[i][lane];
    return result;
}

template <template <class> class Of> inline void set_lane(Of<Floats>& lanes, int lane, const Of<float>& value) {
    static_assert(sizeof(Of<Floats>) == MEMBERS<Of> * sizeof(Floats));
    for (size_t i = 0; i < MEMBERS<Of>; ++i)
        reinterpret_cast<Floats*>(&lanes)[i][lane] = reinterpret_cast<const float*>(&value)[i];
}

template <template <class> class Of> inline Of<Floats> spread(const Of<float>& value) {
    Of<Floats> result;
    for (int lane = 0; lane < LANES; ++lane) set_lane(result, lane, value);
    return result;
}

}  // namespace bytesplat
