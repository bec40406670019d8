#include "pool.hpp"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace thinwire::detail {
namespace {

// More slices than threads, so that a thread whose core is busy with something else delays the call by one slice only.
constexpr std::int64_t kSlicesPerThread = 4;

// One call of parallel_for. It lives on its caller's stack: a worker touches it only between beginning a slice and
// reporting that slice's end, and the caller leaves only when no slice is under way.
struct Job {
    Slice slice;
    void* context;
    std::int64_t count;
    std::int64_t slices;
    std::int64_t begun = 0;
    std::int64_t under_way = 0;
    int helpers;  // how many workers may still join
    std::exception_ptr error;

    std::int64_t bound(std::int64_t index) const {
        return count / slices * index + std::min(index, count % slices);
    }
};

// Slices are coarse, so one mutex guards everything here.
class Pool {
public:
    void run(Job& job) {
        std::unique_lock lock(mutex_);
        hire(job.helpers);
        open_.push_back(&job);
        for (int i = 0; i < job.helpers; ++i) {
            work_.notify_one();
        }
        work(job, lock);
        done_.wait(lock, [&] { return job.under_way == 0; });
        if (job.error) {
            std::rethrow_exception(job.error);
        }
    }

    // From here on every caller does its work alone.
    void retire() {
        std::vector<std::thread> workers;
        {
            std::unique_lock lock(mutex_);
            retired_ = true;
            workers.swap(workers_);
        }
        work_.notify_all();
        for (std::thread& worker : workers) {
            worker.join();
        }
    }

private:
    void hire(int helpers) {
        if (retired_ || std::ssize(workers_) >= helpers) {
            return;
        }
        // Signals are for the threads that Python knows.
        sigset_t all;
        sigset_t previous;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &previous);
        try {
            while (std::ssize(workers_) < helpers) {
                workers_.emplace_back([this] { serve(); });
            }
        } catch (const std::system_error&) {
            // The system has no thread left to give; those that there are do the work.
        }
        pthread_sigmask(SIG_SETMASK, &previous, nullptr);
    }

    void serve() {
        const DefaultFloats floats;
        std::unique_lock lock(mutex_);
        while (true) {
            const auto open = std::find_if(open_.begin(), open_.end(), [](Job* job) { return job->helpers > 0; });
            if (open != open_.end()) {
                Job& job = **open;
                --job.helpers;
                work(job, lock);
            } else if (retired_) {
                return;
            } else {
                work_.wait(lock);
            }
        }
    }

    // Does slices until none is left to begin. The job may be gone when this returns to a worker.
    void work(Job& job, std::unique_lock<std::mutex>& lock) {
        while (job.begun < job.slices) {
            const std::int64_t index = job.begun++;
            close_if_begun(job);
            ++job.under_way;
            lock.unlock();
            std::exception_ptr error;
            try {
                job.slice(job.context, job.bound(index), job.bound(index + 1));
            } catch (...) {
                error = std::current_exception();
            }
            lock.lock();
            if (error && !job.error) {
                job.error = error;
                job.begun = job.slices;
                close_if_begun(job);
            }
            if (--job.under_way == 0 && job.begun == job.slices) {
                done_.notify_all();
                return;
            }
        }
    }

    void close_if_begun(Job& job) {
        if (job.begun == job.slices) {
            std::erase(open_, &job);
        }
    }

    std::mutex mutex_;
    std::condition_variable work_;
    std::condition_variable done_;
    std::deque<Job*> open_;  // jobs with slices that nobody has begun
    std::vector<std::thread> workers_;
    bool retired_ = false;
};

// Never destroyed: a thread may be inside when the process exits. A child of fork has none of its parent's workers and
// may find the mutex locked by one of them, so it begins with a new pool and forgets the old one.
Pool* current = [] {
    pthread_atfork(nullptr, nullptr, [] { current = new Pool; });
    std::atexit([] { current->retire(); });
    return new Pool;
}();

}  // namespace

void run_slices(std::int64_t count, int threads, Slice slice, void* context) {
    const std::int64_t slices = std::min(count, threads * kSlicesPerThread);
    const auto helpers = static_cast<int>(std::min<std::int64_t>(threads, slices)) - 1;
    Job job{.slice = slice, .context = context, .count = count, .slices = slices, .helpers = helpers, .error = {}};
    current->run(job);
}

}  // namespace thinwire::detail
