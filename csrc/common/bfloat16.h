// float32 to bfloat16, its upper half, and back: of normal numbers the relative error is at most 2^-8.
#pragma once
#include "platform.h"

namespace bytesplat {

// From the bits of a float32. To the nearest, ties to even; what is beyond the largest becomes infinite, NaN stays NaN.
BS_HD inline unsigned short bfloat16_of(unsigned bits) {
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<unsigned short>(bits >> 16 | 0x40);
    return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// To the bits of a float32.
BS_HD inline unsigned float_of_bfloat16(unsigned short number) { return static_cast<unsigned>(number) << 16; }

}  // namespace bytesplat
