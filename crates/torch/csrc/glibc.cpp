// libstdc++ asks glibc whether the process has only one thread; the symbol for that came with glibc 2.32. A process with a
// device always has several, and without that symbol the shim runs with every glibc that PyTorch's wheels run with.
extern "C" char __libc_single_threaded = 0;
