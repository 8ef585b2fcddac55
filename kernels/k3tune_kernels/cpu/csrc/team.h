// Threads of a call: those of the OpenMP runtime torch has loaded, so that torch's threads and ours
// are the same ones and never fight for a core.
#pragma once

#include <atomic>
#include <cstdint>

// Weak: where no OpenMP runtime is loaded a call runs in its own thread. libgomp, LLVM's libomp and
// Intel's libiomp5 all have this entry.
extern "C" void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags)
    __attribute__((weak));

namespace k3 {

// True in a process that was forked from one that had loaded this library: libgomp's threads did
// not survive the fork, and a parallel region would wait for them for ever.
bool forked();

// Threads worth their start for steps over so many values.
inline int64_t useful_threads(int64_t threads, int64_t values) {
    constexpr int64_t VALUES_PER_THREAD = 1 << 15;
    const int64_t useful = 1 + values / VALUES_PER_THREAD;
    return threads < useful ? threads : useful;
}

// Multiplications below which another thread costs more than it saves.
constexpr int64_t PRODUCTS_PER_THREAD = 1 << 18;

class Team {
   public:
    // A second call at the same time (from another Python thread) gets one thread.
    explicit Team(int64_t wanted) : alone_(callers().fetch_add(1) == 0) {
        const bool can = alone_ && GOMP_parallel != nullptr && !forked();
        threads_ = can && wanted > 1 ? wanted : 1;
    }
    ~Team() { callers().fetch_sub(1); }
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int64_t threads() const { return threads_; }

    // function(task, thread) for 0 <= task < tasks; which thread takes which task is open.
    template <class Function>
    void run(int64_t tasks, const Function& function) const {
        if (threads_ == 1 || tasks <= 1) {
            for (int64_t task = 0; task < tasks; task++) function(task, int64_t{0});
            return;
        }
        Job<Function> job{function, tasks};
        const int64_t threads = threads_ < tasks ? threads_ : tasks;
        GOMP_parallel(Job<Function>::work, &job, static_cast<unsigned>(threads), 0);
    }

   private:
    template <class Function>
    struct Job {
        const Function& function;
        const int64_t tasks;
        std::atomic<int64_t> next{0}, arrived{0};

        Job(const Function& f, int64_t count) : function(f), tasks(count) {}

        static void work(void* data) {
            Job& job = *static_cast<Job*>(data);
            const int64_t thread = job.arrived.fetch_add(1);
            for (int64_t task; (task = job.next.fetch_add(1)) < job.tasks;)
                job.function(task, thread);
        }
    };

    static std::atomic<int>& callers() {
        static std::atomic<int> count{0};
        return count;
    }

    bool alone_;
    int64_t threads_;
};

}  // namespace k3
