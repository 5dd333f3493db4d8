// The few instructions that CUDA C++ has no name for, and how blocks of one launch talk to each other.
// tests/ops/emulator replaces this header when it runs the kernels on a CPU.
#pragma once

namespace bytesplat {

using uint64 = unsigned long long;

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

__device__ inline unsigned lanes_below() {
    unsigned mask;
    asm("mov.u32 %0, %%lanemask_lt;" : "=r"(mask));
    return mask;
}

// One instruction a side, unlike comparisons, which have to say what NaN does.
__device__ inline float limit(float x, float low, float high) { return fminf(fmaxf(x, low), high); }

// Makes the compiler forget what it knows about a value, and derive anew what depends on it: what was derived before
// holds no registers until then.
template <class T> __device__ inline void forget(T*& pointer) { asm volatile("" : "+l"(pointer)); }
__device__ inline void forget(int& number) { asm volatile("" : "+r"(number)); }

// Asynchronous copy of 4 bytes to shared memory: a thread may have any number of them in flight without a register.
template <class T> __device__ inline void copy_async(T* shared, const T* global) {
    static_assert(sizeof(T) == 4);
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(global) : "memory");
}
__device__ inline void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Words that other blocks of the same launch write while this one reads.
__device__ inline uint64 load_shared_word(const uint64* address) {
    uint64 word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(address) : "memory");
    return word;
}
__device__ inline void store_shared_word(uint64* address, uint64 word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(word) : "memory");
}

__device__ inline unsigned load_flag(const unsigned* address) {
    unsigned word;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(address) : "memory");
    return word;
}
__device__ inline void store_flag(unsigned* address, unsigned word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(word) : "memory");
}
// Orders what a thread has read and written before, in the eyes of the whole GPU, before what it does next.
__device__ inline void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// Lets others run while a warp waits for another block.
__device__ inline void pause() { __nanosleep(300); }

// 2^x, log2(x) and 1/x to 2 ulp, denormals as zero: one instruction each.
__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Adds four floats to global memory: one instruction of 16 bytes where the GPU has it.
__device__ inline void add_vector(float* address, float x, float y, float z, float w) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(x), "f"(y), "f"(z), "f"(w)
                 : "memory");
#else
    atomicAdd(address, x);
    atomicAdd(address + 1, y);
    atomicAdd(address + 2, z);
    atomicAdd(address + 3, w);
#endif
}

// D += A B on the tensor cores: A 16 x 16 and B 16 x 8 of 16-bit numbers, two to a word, along a row of A and a
// column of B. Lane (g, t) = (lane / 4, lane % 4) holds words A[g][t], A[g + 8][t], A[g][t + 4], A[g + 8][t + 4] and
// B[t][g], B[t + 4][g], and of D the elements [g][2t], [g][2t + 1], [g + 8][2t], [g + 8][2t + 1].
__device__ inline void multiply_f16(float d[4], const uint4& a, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
__device__ inline void multiply_bf16(float d[4], const uint4& a, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
// Two floats rounded to 16 bits, the first one in the upper half of the word.
__device__ inline unsigned pack_bf16(float upper, float lower) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(upper), "f"(lower));
    return word;
}
__device__ inline unsigned pack_f16(float upper, float lower) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(upper), "f"(lower));
    return word;
}
// The number in the lower half of a word.
__device__ inline float unpack_f16(unsigned word) {
    float x;
    asm("{ .reg .f16 lower, upper; mov.b32 {lower, upper}, %1; cvt.f32.f16 %0, lower; }" : "=f"(x) : "r"(word));
    return x;
}
// The larger of two numbers in each half.
__device__ inline unsigned larger_f16(unsigned a, unsigned b) {
    unsigned word;
    asm("max.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
    return word;
}

}  // namespace bytesplat
