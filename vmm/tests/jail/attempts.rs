//! What is attempted. Each by a plain system call, so that it is known which.

use std::ffi::CString;
use std::sync::atomic::{AtomicI32, Ordering};

use forge_vmm::jail::slot;

/// Returns the error's number, if it is refused.
pub type Attempt = fn(&[String]) -> Result<(), i32>;

pub fn find(name: &str) -> Attempt {
    let all: &[(&str, Attempt)] = &[
        ("open", open),
        ("create", create),
        ("list", open),
        ("grow_a_file", grow_a_file),
        ("connect", connect),
        ("loopback_up", loopback_up),
        ("abstract", abstract_socket),
        ("vsock", vsock),
        ("out-of-band", out_of_band),
        ("pass_a_descriptor", pass_a_descriptor),
        ("fork", fork),
        ("thread", thread),
        ("execute", execute),
        ("trace_parent", trace_parent),
        ("signal", signal),
        ("signal_parent", signal_parent),
        ("mount", mount),
        ("unshare", unshare),
        ("hostname", hostname),
        ("shared", shared),
        ("capset", capset),
        ("capabilities_by_executing", capabilities_by_executing),
        ("map_executable", map_executable),
        ("map_shared", map_shared),
        ("map_from_the_reserve", map_from_the_reserve),
        ("read_clock_of", read_clock_of),
        ("make_executable", make_executable),
        ("map_much", map_much),
        ("duplicate", duplicate),
        ("create_vm", create_vm),
        ("run_vcpu", run_vcpu),
        ("set_slot", set_slot),
        ("by_int_80", by_int_80),
        ("signal_sibling", signal_sibling),
        ("read_parents_memory", read_parents_memory),
        ("pagemap", scan_pagemap),
        ("write_below_procfs", write_below_procfs),
        ("make_a_vm", make_a_vm),
        ("pause", pause),
        ("spawn_without_namespaces", spawn_without_namespaces),
        ("show_privileges", show_privileges),
        ("show_limits", show_limits),
        ("getppid", getppid),
        ("reboot", reboot),
    ];
    all.iter().find(|(known, _)| *known == name).unwrap().1
}

/// A system call with up to five arguments; what it returned, or its error.
macro_rules! call {
    ($number:expr $(, $argument:expr)* $(,)?) => {{
        // SAFETY: each attempt passes numbers, and pointers to what outlives
        // the call.
        let result = unsafe { libc::syscall($number $(, $argument)*) };
        if result < 0 {
            // SAFETY: errno of this thread.
            Err(unsafe { *libc::__errno_location() })
        } else {
            Ok(result)
        }
    }};
}

fn c(word: &str) -> CString {
    CString::new(word).unwrap()
}

fn open(words: &[String]) -> Result<(), i32> {
    let path = c(&words[0]);
    call!(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), libc::O_RDONLY).map(drop)
}

fn create(words: &[String]) -> Result<(), i32> {
    let path = c(&words[0]);
    let flags = libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY;
    call!(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags, 0o600)?;
    // So that the next may try the same.
    call!(libc::SYS_unlink, path.as_ptr()).map(drop)
}

fn grow_a_file(_: &[String]) -> Result<(), i32> {
    let file = call!(libc::SYS_memfd_create, c"grown".as_ptr(), 0)?;
    call!(libc::SYS_ftruncate, file, 4096).map(drop)
}

fn connect(words: &[String]) -> Result<(), i32> {
    let port: u16 = words[0].parse().unwrap();
    let socket = call!(libc::SYS_socket, libc::AF_INET, libc::SOCK_STREAM, 0)?;
    let address = libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes([127, 0, 0, 1]) },
        sin_zero: [0; 8],
    };
    call!(libc::SYS_connect, socket, &raw const address, size_of_val(&address)).map(drop)
}

fn loopback_up(_: &[String]) -> Result<(), i32> {
    let socket = call!(libc::SYS_socket, libc::AF_INET, libc::SOCK_DGRAM, 0)?;
    // SAFETY: all zero is a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[0] = b'l' as i8;
    request.ifr_name[1] = b'o' as i8;
    call!(libc::SYS_ioctl, socket, libc::SIOCGIFFLAGS, &raw mut request)?;
    // Outside it is up already, and setting it so changes nothing.
    call!(libc::SYS_ioctl, socket, libc::SIOCSIFFLAGS, &raw const request).map(drop)
}

fn abstract_socket(words: &[String]) -> Result<(), i32> {
    let socket = call!(libc::SYS_socket, libc::AF_UNIX, libc::SOCK_STREAM, 0)?;
    let mut address = libc::sockaddr_un { sun_family: libc::AF_UNIX as u16, sun_path: [0; 108] };
    for (at, byte) in words[0].bytes().enumerate() {
        address.sun_path[1 + at] = byte as i8;
    }
    let bytes = size_of::<u16>() + 1 + words[0].len();
    call!(libc::SYS_connect, socket, &raw const address, bytes).map(drop)
}

fn vsock(_: &[String]) -> Result<(), i32> {
    call!(libc::SYS_socket, libc::AF_VSOCK, libc::SOCK_STREAM, 0).map(drop)
}

fn out_of_band(_: &[String]) -> Result<(), i32> {
    call!(libc::SYS_sendto, -1, 0, 0, libc::MSG_OOB, 0, 0).map(drop)
}

fn pass_a_descriptor(_: &[String]) -> Result<(), i32> {
    // It never comes to the message: there is no such socket.
    call!(libc::SYS_sendmsg, -1, 0, 0).map(drop)
}

fn fork(_: &[String]) -> Result<(), i32> {
    let pid = call!(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0)?;
    if pid == 0 {
        // SAFETY: ends the child.
        unsafe { libc::_exit(0) };
    }
    call!(libc::SYS_wait4, pid, 0, 0, 0).map(drop)
}

fn thread(_: &[String]) -> Result<(), i32> {
    // As a thread would be made, but with memory of its own to be harmless.
    let pid =
        call!(libc::SYS_clone, libc::CLONE_FS | libc::CLONE_FILES | libc::SIGCHLD, 0, 0, 0, 0)?;
    if pid == 0 {
        // SAFETY: ends the child.
        unsafe { libc::_exit(0) };
    }
    call!(libc::SYS_wait4, pid, 0, 0, 0).map(drop)
}

fn execute(words: &[String]) -> Result<(), i32> {
    // The command is one that says "done" itself.
    let path = c(&words[0]);
    let arguments = [path.as_ptr(), c"done".as_ptr(), std::ptr::null()];
    call!(libc::SYS_execve, path.as_ptr(), arguments.as_ptr(), 0).map(drop)
}

fn trace_parent(_: &[String]) -> Result<(), i32> {
    const PTRACE_SEIZE: i32 = 0x4206;
    // It is let go when this process ends.
    call!(libc::SYS_ptrace, PTRACE_SEIZE, parent(), 0, 0).map(drop)
}

/// The parent's number. `getppid` is not among the calls that are allowed.
fn parent() -> libc::c_long {
    PARENT.load(Ordering::Relaxed).into()
}

/// Set before the fork.
pub static PARENT: AtomicI32 = AtomicI32::new(0);

fn signal(words: &[String]) -> Result<(), i32> {
    let pid: i32 = words[0].parse().unwrap();
    call!(libc::SYS_kill, pid, 0).map(drop)
}

fn signal_parent(_: &[String]) -> Result<(), i32> {
    call!(libc::SYS_kill, parent(), 0).map(drop)
}

fn mount(_: &[String]) -> Result<(), i32> {
    let kind = c"tmpfs".as_ptr();
    call!(libc::SYS_mount, kind, c"/".as_ptr(), kind, 0, 0).map(drop)
}

fn unshare(_: &[String]) -> Result<(), i32> {
    call!(libc::SYS_unshare, libc::CLONE_NEWUSER).map(drop)
}

fn hostname(_: &[String]) -> Result<(), i32> {
    // SAFETY: all zero is a valid utsname.
    let mut names: libc::utsname = unsafe { std::mem::zeroed() };
    call!(libc::SYS_uname, &raw mut names)?;
    let length = names.nodename.iter().position(|byte| *byte == 0).unwrap();
    call!(libc::SYS_write, 1, names.nodename.as_ptr(), length)?;
    call!(libc::SYS_write, 1, c"\n".as_ptr(), 1).map(drop)
}

fn shared(words: &[String]) -> Result<(), i32> {
    let key: i32 = words[0].parse().unwrap();
    call!(libc::SYS_shmget, key, 0, 0).map(drop)
}

fn capset(_: &[String]) -> Result<(), i32> {
    const CAP_SYS_ADMIN: u32 = 1 << 21;
    let header = [0x2008_0522u32, 0];
    let data = [CAP_SYS_ADMIN, CAP_SYS_ADMIN, 0, 0, 0, 0];
    call!(libc::SYS_capset, header.as_ptr(), data.as_ptr()).map(drop)
}

fn capabilities_by_executing(_: &[String]) -> Result<(), i32> {
    let path = c"/proc/self/exe";
    let arguments = [path.as_ptr(), c"show_capabilities".as_ptr(), std::ptr::null()];
    call!(libc::SYS_execve, path.as_ptr(), arguments.as_ptr(), 0).map(drop)
}

const ANONYMOUS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

fn map_executable(_: &[String]) -> Result<(), i32> {
    let rights = libc::PROT_READ | libc::PROT_EXEC;
    call!(libc::SYS_mmap, 0, 4096, rights, ANONYMOUS, -1, 0).map(drop)
}

/// Keeps the pages of a file of the kernel's, of which one is mapped at the end.
fn map_shared(_: &[String]) -> Result<(), i32> {
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
    let (bytes, rights) = (1usize << 20, libc::PROT_READ | libc::PROT_WRITE);
    let at = call!(libc::SYS_mmap, 0, bytes, rights, flags, -1, 0)?;
    call!(libc::SYS_munmap, at as usize + 4096, bytes - 4096).map(drop)
}

/// What a process of this pid has used of the CPU.
fn read_clock_of(words: &[String]) -> Result<(), i32> {
    let pid: i32 = words[0].parse().unwrap();
    let mut time = [0u64; 2];
    // CPUCLOCK_SCHED of a process (time/posix-timers.h).
    call!(libc::SYS_clock_gettime, !pid << 3 | 2, time.as_mut_ptr()).map(drop)
}

fn map_from_the_reserve(_: &[String]) -> Result<(), i32> {
    // Without a reservation it is mapped though the host's reserve is empty.
    let flags = ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_NORESERVE;
    let rights = libc::PROT_READ;
    call!(libc::SYS_mmap, 0, 2 << 20, rights, flags, -1, 0).map(drop)
}

fn make_executable(_: &[String]) -> Result<(), i32> {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let page = call!(libc::SYS_mmap, 0, 4096, rights, ANONYMOUS, -1, 0)?;
    call!(libc::SYS_mprotect, page, 4096, libc::PROT_READ | libc::PROT_EXEC).map(drop)
}

fn map_much(_: &[String]) -> Result<(), i32> {
    call!(libc::SYS_mmap, 0, 2usize << 30, libc::PROT_NONE, ANONYMOUS, -1, 0).map(drop)
}

fn duplicate(_: &[String]) -> Result<(), i32> {
    for _ in 0..64 {
        call!(libc::SYS_dup, 0)?;
    }
    Ok(())
}

fn create_vm(_: &[String]) -> Result<(), i32> {
    call!(libc::SYS_ioctl, 1, 0xAE01, 0).map(drop)
}

fn run_vcpu(_: &[String]) -> Result<(), i32> {
    call!(libc::SYS_ioctl, 1, 0xAE80, 0).map(drop)
}

/// By a description at the address of the sealed one with these bits changed.
fn set_slot(words: &[String]) -> Result<(), i32> {
    let bits: u64 = words[0].parse().unwrap();
    call!(libc::SYS_ioctl, 1, 0x4020_AE46, slot::address() ^ bits).map(drop)
}

fn by_int_80(_: &[String]) -> Result<(), i32> {
    const GETPID_32: u32 = 20;
    let result: u32;
    // SAFETY: a system call without arguments. It may change r8 to r11.
    unsafe {
        std::arch::asm!(
            "int 0x80",
            inout("eax") GETPID_32 => result,
            out("r8") _, out("r9") _, out("r10") _, out("r11") _,
        );
    }
    if (result as i32) < 0 { Err(-(result as i32)) } else { Ok(()) }
}

fn show_privileges(_: &[String]) -> Result<(), i32> {
    let ask = |option: i32, argument: i32| call!(libc::SYS_prctl, option, argument, 0, 0, 0);
    let bounding = (0..64).filter(|capability| ask(libc::PR_CAPBSET_READ, *capability) == Ok(1));
    println!("bounding {}", bounding.count());
    println!("securebits {:#x}", ask(libc::PR_GET_SECUREBITS, 0)?);
    println!("no_new_privs {}", ask(libc::PR_GET_NO_NEW_PRIVS, 0)?);
    println!("dumpable {}", ask(libc::PR_GET_DUMPABLE, 0)?);
    Ok(())
}

fn show_limits(_: &[String]) -> Result<(), i32> {
    for resource in 0..16 {
        let mut limit = [0u64; 2];
        call!(libc::SYS_prlimit64, 0, resource, 0, limit.as_mut_ptr())?;
        println!("{resource} {} {}", limit[0], limit[1]);
    }
    Ok(())
}

fn getppid(_: &[String]) -> Result<(), i32> {
    call!(libc::SYS_getppid).map(drop)
}

fn reboot(_: &[String]) -> Result<(), i32> {
    call!(libc::SYS_reboot, 0, 0, 0, 0).map(drop)
}

/// Set before the fork.
pub static SIBLING: AtomicI32 = AtomicI32::new(0);
/// An open pagemap, once there is one.
pub static PAGEMAP: AtomicI32 = AtomicI32::new(-1);

fn signal_sibling(_: &[String]) -> Result<(), i32> {
    call!(libc::SYS_kill, SIBLING.load(Ordering::Relaxed), 0).map(drop)
}

fn read_parents_memory(_: &[String]) -> Result<(), i32> {
    let path = c(&format!("/proc/{}/mem", parent()));
    call!(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), libc::O_RDONLY).map(drop)
}

/// Opens this process's pagemap below a procfs.
pub fn open_pagemap(procfs: i32) -> Result<(), i32> {
    let flags = libc::O_RDONLY | libc::O_CLOEXEC;
    let file = call!(libc::SYS_openat, procfs, c"self/pagemap".as_ptr(), flags)?;
    PAGEMAP.store(file as i32, Ordering::Relaxed);
    Ok(())
}

/// `PAGEMAP_SCAN` for the written pages of one page (`linux/fs.h`).
fn scan_pagemap(_: &[String]) -> Result<(), i32> {
    const SCAN: u64 = 0xC060_6610;
    const IS_PRESENT: u64 = 1 << 3;
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let page = call!(libc::SYS_mmap, 0, 4096, rights, ANONYMOUS, -1, 0)?;
    // SAFETY: the page just mapped.
    unsafe { (page as *mut u8).write_volatile(1) };
    let mut region = [0u64; 3];
    // size flags start end walk_end vec vec_len max_pages inverted mask anyof
    // return
    let mut scan = [
        96,
        0,
        page as u64,
        page as u64 + 4096,
        0,
        region.as_mut_ptr() as u64,
        1,
        0,
        0,
        IS_PRESENT,
        0,
        IS_PRESENT,
    ];
    let found = call!(libc::SYS_ioctl, PAGEMAP.load(Ordering::Relaxed), SCAN, scan.as_mut_ptr())?;
    if found == 1 && region[0] == page as u64 { Ok(()) } else { Err(0) }
}

/// The detached procfs, once a worker has it.
pub static PROCFS: AtomicI32 = AtomicI32::new(-1);

fn write_below_procfs(_: &[String]) -> Result<(), i32> {
    let path = c"self/oom_score_adj";
    call!(libc::SYS_openat, PROCFS.load(Ordering::Relaxed), path.as_ptr(), libc::O_WRONLY).map(drop)
}

/// Descriptor 0 is `/dev/kvm`. A VM, a slot of memory, a vCPU and its page.
fn make_a_vm(_: &[String]) -> Result<(), i32> {
    let (create_vm, mmap_size, create_vcpu, set_memory) = (0xAE01, 0xAE04, 0xAE41, 0x4020_AE46);
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let vm = call!(libc::SYS_ioctl, 0, create_vm, 0)?;
    let memory = call!(libc::SYS_mmap, 0, 1 << 20, rights, ANONYMOUS, -1, 0)?;
    // Slot and flags, guest address, size, host address.
    let region = [0u64, 0, 1 << 20, memory as u64];
    call!(libc::SYS_ioctl, vm, set_memory, region.as_ptr())?;
    let vcpu = call!(libc::SYS_ioctl, vm, create_vcpu, 0)?;
    let bytes = call!(libc::SYS_ioctl, 0, mmap_size, 0)?;
    call!(libc::SYS_mmap, 0, bytes, rights, libc::MAP_SHARED, vcpu, 0).map(drop)
}

fn pause(_: &[String]) -> Result<(), i32> {
    loop {
        let _ = call!(libc::SYS_poll, 0, 0, 60_000);
    }
}

fn spawn_without_namespaces(_: &[String]) -> Result<(), i32> {
    use forge_vmm::jail::{Place, spawn};
    std::fs::write("/proc/sys/user/max_user_namespaces", "0").unwrap();
    let words = [std::ffi::OsStr::new("x")];
    let refused = spawn(std::path::Path::new("/proc/self/exe"), &words, vec![], Place::best());
    println!("{}", refused.unwrap_err());
    Ok(())
}
