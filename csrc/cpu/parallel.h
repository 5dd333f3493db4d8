// Loops shared out over threads.
//
// The caller works too, and waits only for threads that have taken part: one that the system does not schedule in time
// costs nothing. Threads look for work a moment and then sleep. (OpenMP meets at the end of every loop and spins there,
// which costs a time slice per loop as soon as other programs want the processor.) Which thread runs which part of a
// loop is left to chance, so the loops must not let results depend on it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>

namespace bytesplat {

// One loop under way: parts are handed out in order.
struct Loop {
    void (*run_part)(void* body, int64_t part);
    void* body;
    int64_t parts;
    int helpers_wanted;
    std::atomic<int64_t> next{0};    // part
    std::atomic<int> helpers{0};     // at work; only raised while the pool's mutex is held
    std::atomic<bool> failed{false};
    std::exception_ptr failure{};  // what the first part that failed threw; no part is begun after it

    void work() noexcept {
        for (int64_t part; !failed && (part = next.fetch_add(1, std::memory_order_relaxed)) < parts;) {
            try {
                run_part(body, part);
            } catch (...) {
                if (!failed.exchange(true)) failure = std::current_exception();
            }
        }
    }
};

// The threads of the process, made when they are first wanted. It works on one loop at a time.
class Pool {
  public:
    static Pool& instance();

    // Runs all parts of a loop; alone, if the pool is busy with another caller's or belongs to the process before a fork.
    void run(Loop& loop);

  private:
    void help();

    std::mutex caller_;  // held by the caller whose loop is under way
    std::mutex mutex_;   // guards what follows
    std::condition_variable posted_, left_;
    Loop* loop_ = nullptr;
    std::atomic<uint64_t> loops_{0};  // posted so far
    int workers_ = 0;
    int process_ = 0;
};

// Calls body(i) for all i in [0, count), `grain` of them in a row on the same thread. Throws what a call throws.
template <class Body> void parallel_for(int threads, int64_t count, int64_t grain, Body body) {
    struct Range {
        Body& body;
        int64_t count, grain;
    } range{body, count, grain};
    const auto run_part = [](void* context, int64_t part) {
        const Range& range = *static_cast<Range*>(context);
        const int64_t first = part * range.grain, last = first + range.grain;
        for (int64_t i = first; i < (last < range.count ? last : range.count); ++i) range.body(i);
    };
    const int64_t parts = (count + grain - 1) / grain;
    Loop loop{run_part, &range, parts, int(threads < parts ? threads : parts) - 1};
    if (loop.helpers_wanted > 0)
        Pool::instance().run(loop);
    else
        loop.work();
    if (loop.failure) std::rethrow_exception(loop.failure);
}

}  // namespace bytesplat
