// Runs CUDA kernels on a CPU: every thread of a block is a fiber, blocks run one after another.
//
// Where a block waits for another one (it calls pause), the next block begins or goes on, each on a thread of the
// operating system with shared memory of its own, one at a time. At most as many as the environment variable
// EMULATED_BLOCKS says run together.
//
// A fiber runs until it meets a barrier or an exchange with other lanes; then the next one runs. A warp's exchange
// happens when all its lanes that still live have arrived at one of the same kind; a block that cannot go on stops
// the program with a message. So what is checked is the kernels' logic and arithmetic, on any machine, and not their
// races or their speed.
#pragma once

#include <csetjmp>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static thread_local
#define __launch_bounds__(...)
#define __restrict__
#define __align__(n) __attribute__((aligned(n)))

using std::max;
using std::min;

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace simt {

constexpr int WARP = 32;
constexpr size_t STACK = 128 << 10;

struct Index { unsigned x = 0, y = 0, z = 0; };

struct Fiber {
    jmp_buf state;
    std::unique_ptr<char[]> stack;
    Index thread;
    bool finished = false, waiting = false;
    int kind = 0;  // of the exchange it waits at
};

// Who runs blocks: the thread that launches, and others for as long as blocks wait.
struct Runner {
    Index block;
    std::vector<Fiber> fibers;
    int current;
    jmp_buf scheduler;
    uint64_t slots[1024][8];  // what a lane offers to its warp
    bool finished;
    std::thread thread;
};

inline Index block_size, grid_size;
inline std::function<void()> body;
inline std::vector<std::unique_ptr<Runner>> runners;  // of the last launches; `active` of them take part in this one
inline Runner* runner;                                // whose turn it is
inline unsigned active, next_block, pauses;           // pauses since a block told another something
inline std::mutex mutex;
inline std::condition_variable turn;

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "block %u: %s\n", runner->block.x, what);
    std::abort();
}

inline void switch_to_scheduler() {
    if (!_setjmp(runner->fibers[runner->current].state)) _longjmp(runner->scheduler, 1);
}

// Waits until fibers [first, last) that still live are all here.
inline void meet(int first, int last, int kind) {
    Fiber& self = runner->fibers[runner->current];
    self.kind = kind;
    self.waiting = true;
    bool complete = true;
    for (int i = first; i < last; ++i) complete = complete && (runner->fibers[i].finished || runner->fibers[i].waiting);
    if (complete) {
        for (int i = first; i < last; ++i)
            if (!runner->fibers[i].finished && runner->fibers[i].kind != kind) fail("lanes wait at different barriers");
        for (int i = first; i < last; ++i) runner->fibers[i].waiting = false;
        return;
    }
    while (self.waiting) switch_to_scheduler();
}

inline int warp_start() { return runner->current / WARP * WARP; }
inline int lane() { return runner->current % WARP; }
inline void meet_warp(int kind) { meet(warp_start(), std::min<int>(warp_start() + WARP, runner->fibers.size()), kind); }
inline void meet_block(int kind) { meet(0, runner->fibers.size(), kind); }

inline void enter() {
    body();
    runner->fibers[runner->current].finished = true;
    // Those who wait for this one need not any longer.
    for (auto range : {std::pair<int, int>{warp_start(), std::min<int>(warp_start() + WARP, runner->fibers.size())},
                       std::pair<int, int>{0, static_cast<int>(runner->fibers.size())}}) {
        bool complete = true, any = false;
        int kind = -1;
        for (int i = range.first; i < range.second; ++i) {
            if (runner->fibers[i].finished) continue;
            complete = complete && runner->fibers[i].waiting;
            any = true;
            if (kind < 0) kind = runner->fibers[i].kind;
            complete = complete && runner->fibers[i].kind == kind;
        }
        const bool whole_block = range.first == 0 && range.second == static_cast<int>(runner->fibers.size());
        if (complete && any && (whole_block == (kind >= 100) || runner->fibers.size() <= WARP))
            for (int i = range.first; i < range.second; ++i) runner->fibers[i].waiting = false;
    }
    _longjmp(runner->scheduler, 1);
}

inline void run_block(unsigned threads) {
    Runner& self = *runner;
    self.fibers.resize(threads);
    ucontext_t back;
    for (unsigned t = 0; t < threads; ++t) {
        Fiber& fiber = self.fibers[t];
        if (!fiber.stack) fiber.stack.reset(new char[STACK]);
        fiber.thread = {t, 0, 0};
        fiber.finished = fiber.waiting = false;
    }
    std::vector<bool> started(threads, false);
    for (unsigned done = 0; done < threads;) {
        bool moved = false;
        for (unsigned t = 0; t < threads; ++t) {
            if (self.fibers[t].finished || self.fibers[t].waiting) continue;
            moved = true;
            self.current = t;
            if (!_setjmp(self.scheduler)) {
                if (started[t]) _longjmp(self.fibers[t].state, 1);
                started[t] = true;
                ucontext_t context;
                getcontext(&context);
                context.uc_stack.ss_sp = self.fibers[t].stack.get();
                context.uc_stack.ss_size = STACK;
                context.uc_link = &back;
                makecontext(&context, enter, 0);
                setcontext(&context);
            }
            if (self.fibers[t].finished) ++done;
        }
        if (!moved && done < threads) fail("no thread can go on: some wait at a barrier that others never reach");
    }
}

inline void run_blocks() {
    while (next_block < grid_size.x) {
        runner->block = {next_block++, 0, 0};
        run_block(block_size.x);
    }
}

// Gives the turn to another runner and, unless this one has finished, waits until it comes back.
inline void pass_turn(Runner* self, Runner* other) {
    std::unique_lock<std::mutex> lock(mutex);
    runner = other;
    turn.notify_all();
    if (!self->finished) turn.wait(lock, [&] { return runner == self; });
}

inline Runner* another_runner(unsigned self) {
    for (unsigned i = 1; i <= active; ++i)
        if (Runner* other = runners[(self + i) % active].get(); !other->finished) return other;
    return runners[0].get();
}

inline unsigned index_of(const Runner* one) {
    unsigned i = 0;
    while (runners[i].get() != one) ++i;
    return i;
}

inline Runner* new_runner() {
    if (runners.size() == active) runners.push_back(std::make_unique<Runner>());
    Runner* created = runners[active++].get();
    created->finished = false;
    return created;
}

// Lets other blocks run while this one waits for them.
inline void pause_block() {
    const char* text = std::getenv("EMULATED_BLOCKS");
    const unsigned most = text ? std::atoi(text) : 1u << 20;
    if (++pauses > 100 * (active + 1)) fail("blocks wait for one another");
    Runner* self = runner;
    if (next_block >= grid_size.x || active >= most) return pass_turn(self, another_runner(index_of(self)));
    Runner* created = new_runner();
    created->thread = std::thread([created] {
        {
            std::unique_lock<std::mutex> lock(mutex);
            turn.wait(lock, [&] { return runner == created; });
        }
        run_blocks();
        created->finished = true;
        pass_turn(created, another_runner(index_of(created)));
    });
    pass_turn(self, created);
}

inline void launch(unsigned blocks, unsigned threads, std::function<void()> kernel) {
    body = std::move(kernel);
    block_size = {threads, 1, 1}, grid_size = {blocks, 1, 1};
    active = next_block = pauses = 0;
    runner = new_runner();
    Runner* self = runner;
    run_blocks();
    // Those that still wait go on in turns, and come back here when all are done.
    for (Runner* other; (other = another_runner(0)) != self;) pass_turn(self, other);
    for (unsigned i = 1; i < active; ++i) runners[i]->thread.join();
}

// A lane offers a value, takes another lane's.
template <class T> inline T exchange(T value, int source, int kind) {
    static_assert(sizeof(T) <= 8);
    std::memcpy(&runner->slots[runner->current][0], &value, sizeof(T));
    meet_warp(kind);
    T taken;
    std::memcpy(&taken, &runner->slots[warp_start() + source][0], sizeof(T));
    meet_warp(kind + 1);
    return taken;
}

inline unsigned ballot(bool vote) {
    runner->slots[runner->current][0] = vote;
    meet_warp(40);
    unsigned votes = 0;
    for (int l = 0; l < WARP && warp_start() + l < static_cast<int>(runner->fibers.size()); ++l)
        if (!runner->fibers[warp_start() + l].finished && runner->slots[warp_start() + l][0]) votes |= 1u << l;
    meet_warp(41);
    return votes;
}

}  // namespace simt

#define threadIdx (simt::runner->fibers[simt::runner->current].thread)
#define blockIdx simt::runner->block
#define blockDim simt::block_size
#define gridDim simt::grid_size

inline void __syncthreads() { simt::meet_block(100); }
inline void __syncwarp(unsigned = 0xffffffffu) { simt::meet_warp(10); }
inline unsigned __ballot_sync(unsigned, bool vote) { return simt::ballot(vote); }
inline bool __all_sync(unsigned, bool vote) { return simt::ballot(!vote) == 0; }
inline bool __any_sync(unsigned, bool vote) { return simt::ballot(vote) != 0; }
template <class T> inline T __shfl_sync(unsigned, T value, int source) {
    return simt::exchange(value, source & 31, 20);
}
template <class T> inline T __shfl_xor_sync(unsigned, T value, int mask) {
    return simt::exchange(value, simt::lane() ^ mask, 22);
}
template <class T> inline T __shfl_up_sync(unsigned, T value, int delta) {
    return simt::exchange(value, simt::lane() >= delta ? simt::lane() - delta : simt::lane(), 24);
}

template <class T> inline T atomicAdd(T* address, T value) {
    const T old = *address;
    *address += value;
    return old;
}
template <class T> inline T atomicMax(T* address, T value) {
    const T old = *address;
    *address = std::max(old, value);
    return old;
}

inline unsigned __float_as_uint(float x) { unsigned w; std::memcpy(&w, &x, 4); return w; }
inline float __uint_as_float(unsigned w) { float x; std::memcpy(&x, &w, 4); return x; }
inline int __float_as_int(float x) { int w; std::memcpy(&w, &x, 4); return w; }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline float __saturatef(float x) { return std::fmin(std::fmax(x, 0.0f), 1.0f); }
inline int __ffs(unsigned w) { return __builtin_ffs(w); }
inline int __popc(unsigned w) { return __builtin_popcount(w); }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }

// What csrc/cuda/device.h writes in PTX.
namespace bytesplat {

using uint64 = unsigned long long;

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

inline unsigned lanes_below() { return (1u << simt::lane()) - 1; }
inline float limit(float x, float low, float high) { return std::fmin(std::fmax(x, low), high); }
template <class T> inline void copy_async(T* shared, const T* global) { *shared = *global; }
inline void copy_async_wait() {}
inline uint64 load_shared_word(const uint64* address) { return *address; }
inline void store_shared_word(uint64* address, uint64 word) { *address = word; }
inline unsigned load_flag(const unsigned* address) { return *address; }
inline void store_flag(unsigned* address, unsigned word) {
    *address = word;
    simt::pauses = 0;
}
inline void fence() {}
template <class T> inline void forget(T&) {}
inline void pause() {
    if (simt::lane() == 0) simt::pause_block();
    simt::switch_to_scheduler();
}
inline float exp2_fast(float x) { return std::exp2(x); }
inline float log2_fast(float x) { return std::log2(x); }
inline float reciprocal_fast(float x) { return 1.0f / x; }
inline void add_vector(float* address, float x, float y, float z, float w) {
    if (reinterpret_cast<uintptr_t>(address) % 16) simt::fail("a vector of four floats is not aligned");
    address[0] += x, address[1] += y, address[2] += z, address[3] += w;
}

// D += A B, with every lane's share of A and B as device.h describes it; `value` unpacks a half of a word.
template <class Value> inline void multiply(float d[4], const uint4& a, unsigned b0, unsigned b1, Value value) {
    const unsigned words[6] = {a.x, a.y, a.z, a.w, b0, b1};
    for (int i = 0; i < 6; ++i) simt::runner->slots[simt::runner->current][i] = words[i];
    simt::meet_warp(30);
    const int g = simt::lane() / 4, t = simt::lane() % 4;
    for (int i = 0; i < 4; ++i) {
        const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
        for (int k = 0; k < 8; ++k)
            for (bool upper : {false, true}) {
                const unsigned of_a = simt::runner->slots[simt::warp_start() + row % 8 * 4 + k % 4][row / 8 + 2 * (k / 4)];
                const unsigned of_b = simt::runner->slots[simt::warp_start() + column * 4 + k % 4][4 + k / 4];
                d[i] += value(of_a, upper) * value(of_b, upper);
            }
    }
    simt::meet_warp(31);
}
inline float half_of(unsigned word, bool upper) {
    _Float16 half;
    const uint16_t bits = upper ? word >> 16 : word & 0xffff;
    std::memcpy(&half, &bits, 2);
    return static_cast<float>(half);
}
inline void multiply_f16(float d[4], const uint4& a, unsigned b0, unsigned b1) { multiply(d, a, b0, b1, half_of); }
inline void multiply_bf16(float d[4], const uint4& a, unsigned b0, unsigned b1) {
    multiply(d, a, b0, b1, [](unsigned w, bool upper) { return __uint_as_float(upper ? w & 0xffff0000u : w << 16); });
}
inline unsigned round_bf16(float x) {
    const unsigned w = __float_as_uint(x);
    return (w + 0x7fffu + (w >> 16 & 1)) >> 16;
}
inline unsigned round_f16(float x) {
    const _Float16 half = static_cast<_Float16>(x);
    uint16_t bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}
inline unsigned pack_bf16(float upper, float lower) { return round_bf16(upper) << 16 | round_bf16(lower); }
inline unsigned pack_f16(float upper, float lower) { return round_f16(upper) << 16 | round_f16(lower); }
inline float unpack_f16(unsigned word) { return half_of(word, false); }
inline unsigned larger_f16(unsigned a, unsigned b) {
    return pack_f16(std::max(half_of(a, true), half_of(b, true)), std::max(half_of(a, false), half_of(b, false)));
}

}  // namespace bytesplat
