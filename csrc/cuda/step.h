// What the kernels of a step know about its sizes, which only the device knows: nothing is read back to the host.
//
// Buffers are allocated larger than needed. A kernel whose output does not fit says so in `halted`; every later
// kernel of the step, the optimizer's included, then does nothing, and the host repeats the step with larger buffers.
#pragma once
#include "layout.h"

namespace bytesplat {

struct StepState {
    long long records;  // rows of the record table in use
    long long pairs;    // (record, tile) pairs in use
    long long halted;   // not zero: something did not fit
};

__device__ inline const StepState& step_state(const long long* state) {
    return *reinterpret_cast<const StepState*>(state);
}
__device__ inline StepState& step_state(long long* state) { return *reinterpret_cast<StepState*>(state); }

// A record's row, with room to spare so that it can be read as three float4; gradient rows likewise.
constexpr int RECORD_STRIDE = 12;
constexpr int ROW_STRIDE = 12;
constexpr int ROW_STRIDE_WITH_STATISTICS = 16;

}  // namespace bytesplat
