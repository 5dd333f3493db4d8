#include "parallel.h"

#include <chrono>
#include <system_error>
#include <thread>

#include <unistd.h>

namespace bytesplat {
namespace {

// Waits a moment (the gap between two stages of a step) for something that is about to happen.
template <class Condition> void spin_until(Condition condition) {
    using Clock = std::chrono::steady_clock;
    const auto end = Clock::now() + std::chrono::microseconds(30);
    while (!condition() && Clock::now() < end) {
    }
}

}  // namespace

Pool& Pool::instance() {
    static Pool* pool = new Pool;  // never destroyed: its threads sleep in it while the process exits
    return *pool;
}

void Pool::run(Loop& loop) {
    const std::unique_lock<std::mutex> caller(caller_, std::try_to_lock);
    if (!caller.owns_lock()) return loop.work();
    if (process_ == 0) process_ = getpid();
    if (process_ != getpid()) return loop.work();
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        try {
            for (; workers_ < loop.helpers_wanted; ++workers_) std::thread(&Pool::help, this).detach();
        } catch (const std::system_error&) {  // the system gives no more threads: those that are there will do
        }
        loop_ = &loop;
        ++loops_;
    }
    posted_.notify_all();
    loop.work();

    std::unique_lock<std::mutex> lock(mutex_);
    loop_ = nullptr;  // nobody joins any more
    lock.unlock();
    spin_until([&] { return loop.helpers == 0; });
    lock.lock();
    left_.wait(lock, [&] { return loop.helpers == 0; });
}

void Pool::help() {
    uint64_t seen = 0;
    for (;;) {
        spin_until([&] { return loops_ != seen; });
        std::unique_lock<std::mutex> lock(mutex_);
        posted_.wait(lock, [&] { return loops_ != seen; });
        seen = loops_;
        Loop* const loop = loop_;
        if (loop == nullptr || loop->helpers == loop->helpers_wanted) continue;
        ++loop->helpers;
        lock.unlock();
        loop->work();
        lock.lock();
        if (--loop->helpers == 0) left_.notify_one();
    }
}

}  // namespace bytesplat
