// Two names of glibc that the standard library's headers ask for, as older glibcs have them: with
// these the extension asks for no newer glibc than torch does, wherever it is compiled.
#include <pthread.h>

#if defined(__x86_64__) && defined(__GLIBC__)

extern "C" {

int pthread_once_2_2_5(pthread_once_t* once, void (*function)(void));
__asm__(".symver pthread_once_2_2_5, pthread_once@GLIBC_2.2.5");

// std::call_once. That of 2.34 is the same function, in another library of glibc's.
[[gnu::visibility("hidden")]] int pthread_once(pthread_once_t* once, void (*function)(void)) {
  return pthread_once_2_2_5(once, function);
}

// std::shared_ptr counts without atomics where this is set, which glibc 2.32 and newer does for
// processes of one thread.
[[gnu::visibility("hidden")]] extern char __libc_single_threaded;
char __libc_single_threaded = 0;

}  // extern "C"

#endif
