// Threads and signals of the I/O engine.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace zshard::offload {

/// Starts a thread that takes no signal: handlers run on the user's threads, and a write beyond
/// RLIMIT_FSIZE is an error instead of a deadly SIGXFSZ. Throws std::system_error.
template <class Function>
std::thread start_thread(const char* name, Function&& function) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread thread(std::forward<Function>(function));
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_setname_np(thread.native_handle(), name);
    return thread;
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
}

/// While it lives, SIGXFSZ that this thread causes is dropped.
class FileSizeSignalGuard {
 public:
  FileSizeSignalGuard() {
    sigemptyset(&signal_);
    sigaddset(&signal_, SIGXFSZ);
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGXFSZ) == 1;
    pthread_sigmask(SIG_BLOCK, &signal_, &before_);
  }
  ~FileSizeSignalGuard() {
    const timespec at_once{0, 0};
    if (!was_pending_) {
      while (sigtimedwait(&signal_, nullptr, &at_once) == SIGXFSZ) {
      }
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  FileSizeSignalGuard(const FileSizeSignalGuard&) = delete;
  FileSizeSignalGuard& operator=(const FileSizeSignalGuard&) = delete;

 private:
  sigset_t signal_{};
  sigset_t before_{};
  bool was_pending_ = false;
};

}  // namespace zshard::offload
