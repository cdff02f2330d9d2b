//! Commands of bpf(2) that no crate offers.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

/// `BPF_OBJ_GET`, `BPF_PROG_QUERY` and `BPF_LINK_DETACH`, by the kernel's numbers.
const OBJ_GET: libc::c_long = 7;
pub(super) const PROG_QUERY: libc::c_long = 16;
const LINK_DETACH: libc::c_long = 34;

/// Runs one command.
///
/// # Safety
/// `attr` is what this command takes, in the kernel's layout. Descriptors in it are open. Its pointers may be read, and
/// written where the command writes, for as many bytes or numbers as `attr` says.
///
/// # Errors
/// The kernel's error.
#[expect(unsafe_code, reason = "no crate has this system call")]
pub(super) unsafe fn bpf<Attr>(command: libc::c_long, attr: &mut Attr) -> io::Result<i32> {
    // SAFETY: the attributes are borrowed for the call and of the size that is named; the rest is the caller's promise.
    let answer =
        unsafe { libc::syscall(libc::SYS_bpf, command, &raw mut *attr, size_of::<Attr>()) };
    if answer < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(i32::try_from(answer).unwrap_or(i32::MAX))
}

#[repr(C)]
struct Get {
    path: u64,
    descriptor: u32,
    flags: u32,
}

#[repr(C)]
struct Detach {
    link: u32,
}

/// Detaches the program of a pinned link. When this returns, the kernel no longer runs the program. Without this, the
/// kernel detaches it some time after the link's last pin or descriptor is gone.
///
/// # Errors
/// Nothing is pinned there, the pin is no link, or the link is of a kind that cannot be detached.
#[expect(unsafe_code, reason = "no crate detaches a link that is pinned")]
pub(super) fn detach_pinned(pin: &Path) -> io::Result<()> {
    let path = CString::new(pin.as_os_str().as_bytes())?;
    let mut get = Get {
        path: path.as_ptr().expose_provenance() as u64,
        descriptor: 0,
        flags: 0,
    };
    // SAFETY: the path is a string of C that lives until this function ends, and the kernel only reads it.
    let descriptor = unsafe { bpf(OBJ_GET, &mut get) }?;
    // SAFETY: the kernel has made this descriptor for this call, and no other code knows of it.
    let link = unsafe { OwnedFd::from_raw_fd(descriptor) };
    let mut detach = Detach {
        link: link.as_fd().as_raw_fd().cast_unsigned(),
    };
    // SAFETY: the descriptor is open until this function ends.
    unsafe { bpf(LINK_DETACH, &mut detach) }.map(|_zero| ())
}
