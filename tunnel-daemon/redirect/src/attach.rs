//! Programs on a cgroup, attached for as long as this process holds the descriptors of their links: its death detaches
//! them.

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;

use aya::Ebpf;
use aya::programs::links::{FdLink, PinnedLink};
use aya::programs::{CgroupAttachMode, CgroupSockAddr, ProgramError, SockOps};

use crate::caps::deepest;
use crate::object::KernelError;

/// Second cause of the kernel's error for a missing right: a program attached without BPF_F_ALLOW_MULTI.
const ALONE: &str = "or a program on this cgroup or on a parent was attached without `multi`: `bpftool cgroup tree` lists the programs";

/// Opens a cgroup to attach to.
///
/// # Errors
/// The path does not exist, or is no cgroup of version 2.
pub fn open_cgroup(path: &Path) -> Result<File, KernelError> {
    let refused = |cause: String| KernelError::Cgroup {
        path: path.display().to_string(),
        cause,
    };
    let folder = File::open(path).map_err(|error| refused(error.to_string()))?;
    // Every folder of cgroup2 has these files.
    if !path.join("cgroup.procs").exists() || !path.join("cgroup.controllers").exists() {
        return Err(refused("it is no cgroup of version 2".to_owned()));
    }
    Ok(folder)
}

/// Loads and attaches a program, and gives its link. A macro, because the kinds of programs share no trait for these
/// methods. A link may ask for no flags: with links the kernel always takes many programs (BPF_F_ALLOW_MULTI). Ours runs
/// after the programs that the cgroup has already, and before those of the cgroups above.
macro_rules! attached {
    ($kind:ty, $ebpf:expr, $name:expr, $cgroup:expr) => {{
        let program: &mut $kind = $ebpf
            .program_mut($name)
            .ok_or(KernelError::NotInObject($name))?
            .try_into()
            .map_err(|_other: ProgramError| KernelError::NotInObject($name))?;
        program.load().map_err(failed("load", $name))?;
        let id = program
            .attach($cgroup, CgroupAttachMode::Single)
            .map_err(failed("attach", $name))?;
        let link = program.take_link(id).map_err(failed("attach", $name))?;
        FdLink::try_from(link).map_err(|error| KernelError::Program {
            action: "attach",
            program: $name,
            cause: error.to_string(),
        })?
    }};
}

/// Attached programs. Dropping detaches them, the last first: each program is attached after those it depends on. The
/// kernel also detaches them when the process ends, in any order.
#[derive(Debug, Default)]
pub struct Attached {
    links: Vec<(&'static str, FdLink)>,
    /// These stay attached when dropped.
    pinned: Vec<PinnedLink>,
}

impl Attached {
    /// Loads a cgroup socket address program and attaches it.
    ///
    /// # Errors
    /// The kernel's error, with the program's name.
    pub fn sock_addr(
        &mut self,
        ebpf: &mut Ebpf,
        name: &'static str,
        cgroup: &File,
    ) -> Result<(), KernelError> {
        let link = attached!(CgroupSockAddr, ebpf, name, cgroup);
        self.links.push((name, link));
        Ok(())
    }

    /// Loads a socket operations program and attaches it.
    ///
    /// # Errors
    /// The kernel's error, with the program's name.
    pub fn sock_ops(
        &mut self,
        ebpf: &mut Ebpf,
        name: &'static str,
        cgroup: &File,
    ) -> Result<(), KernelError> {
        let link = attached!(SockOps, ebpf, name, cgroup);
        self.links.push((name, link));
        Ok(())
    }

    /// Pins these programs below a folder of bpffs: they stay attached after the process ends, until their files are
    /// removed.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn pin(&mut self, names: &[&str], folder: &Path) -> Result<(), KernelError> {
        let links = std::mem::take(&mut self.links);
        for (name, link) in links {
            if !names.contains(&name) {
                self.links.push((name, link));
                continue;
            }
            let pinned = link
                .pin(folder.join(name))
                .map_err(|error| KernelError::Program {
                    action: "pin",
                    program: name,
                    cause: deepest(&error),
                })?;
            self.pinned.push(pinned);
        }
        Ok(())
    }

    /// Number of attached programs.
    #[must_use]
    pub fn count(&self) -> usize {
        self.links.len() + self.pinned.len()
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let_go(&mut self.links);
    }
}

/// Drops the last first; a dropped `Vec` begins with its first.
fn let_go<T>(held: &mut Vec<T>) {
    while let Some(last) = held.pop() {
        drop(last);
    }
}

fn failed(action: &'static str, program: &'static str) -> impl FnOnce(ProgramError) -> KernelError {
    move |error| {
        let cause = match &error {
            ProgramError::SyscallError(refused)
                if action == "attach" && refused.io_error.kind() == ErrorKind::PermissionDenied =>
            {
                format!("{} ({ALONE})", refused.io_error)
            }
            other => said(other),
        };
        KernelError::Program {
            action,
            program,
            cause,
        }
    }
}

/// The kernel's reason for refusing a program.
pub fn said(error: &ProgramError) -> String {
    // Of the verifier's log, the last line before its statistics names the fault.
    if let ProgramError::LoadError {
        io_error,
        verifier_log,
    } = error
    {
        let log = verifier_log.to_string();
        let last = log.lines().rev().find(|line| !is_statistics(line));
        return format!("{io_error}: {}", last.unwrap_or_default());
    }
    deepest(error)
}

fn is_statistics(line: &str) -> bool {
    line.trim().is_empty()
        || ["processed ", "verification time ", "stack depth "]
            .iter()
            .any(|start| line.starts_with(start))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use aya::sys::SyscallError;

    use super::*;

    #[test]
    fn an_exclusive_program_is_named_as_possible_cause_of_a_failed_attach() {
        let of = |action, errno| {
            let refused = ProgramError::SyscallError(SyscallError {
                call: "bpf_link_create",
                io_error: std::io::Error::from_raw_os_error(errno),
            });
            failed(action, "adit_connect4")(refused).to_string()
        };
        let said = of("attach", libc::EPERM);
        assert!(
            said.contains("not permitted") && said.contains("bpftool cgroup tree"),
            "{said}"
        );
        for other in [of("load", libc::EPERM), of("attach", libc::ENOENT)] {
            assert!(!other.contains("bpftool"), "{other}");
        }
    }

    /// Records its number when dropped.
    struct Noted<'a>(u8, &'a RefCell<Vec<u8>>);

    impl Drop for Noted<'_> {
        fn drop(&mut self) {
            self.1.borrow_mut().push(self.0);
        }
    }

    /// The program attached first reports the destinations of redirected connections. Without it the listener would
    /// refuse these connections.
    #[test]
    fn programs_are_detached_in_reverse_order() {
        let order = RefCell::default();
        let mut held = Vec::from([1, 2, 3].map(|number| Noted(number, &order)));
        let_go(&mut held);
        assert_eq!(*order.borrow(), [3, 2, 1]);
    }

    #[test]
    fn verifier_statistics_are_skipped() {
        let log = "369: (73) *(u8 *)(r5 +0) = r2\nR5 pointer arithmetic prohibited\nverification time 3 usec\nstack depth 176\nprocessed 254 insns\n\n";
        let last = log.lines().rev().find(|line| !is_statistics(line));
        assert_eq!(last, Some("R5 pointer arithmetic prohibited"));
    }
}
