//! An io_uring that only polls descriptors. Its entries contain no pointers, so no memory has to outlive them.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
    time::Duration,
};

use io_uring::{
    IoUring, Probe, cqueue, opcode, squeue,
    types::{Fd, SubmitArgs, Timespec},
};
use rustix::io::Errno;

/// Submissions collected per turn. Further ones are submitted at once.
const ENTRIES: u32 = 256;
/// Size of the completion queue: four per submission. Beyond this the kernel uses an overflow list.
const COMPLETIONS: u32 = 4 * ENTRIES;
/// Most kernel workers. Polls and cancels should need none; the limit bounds them anyway.
const WORKERS_MAX: [u32; 2] = [1, 4];

/// A completion of one watch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Completion {
    pub(crate) user_data: u64,
    /// Poll flags, or a negative errno.
    pub(crate) result: i32,
    /// Whether the watch continues.
    pub(crate) more: bool,
}

/// One ring, used by the thread that created it.
pub(crate) struct Ring(IoUring);

impl Ring {
    /// Creates and drops a ring, to find out whether this host allows [`Self::new`].
    ///
    /// Runs on a separate thread: the kernel destroys a ring later and interrupts blocking calls of the creating
    /// thread. A `recv` with a timeout would fail with EINTR.
    pub(crate) fn probe() -> io::Result<()> {
        std::thread::Builder::new()
            .name("ring-probe".to_owned())
            .spawn(Self::try_one)?
            .join()
            .unwrap_or_else(|_panic| Err(Errno::OPNOTSUPP.into()))
    }

    fn try_one() -> io::Result<()> {
        let ring = Self::new()?;
        let mut probe = Probe::new();
        ring.0.submitter().register_probe(&mut probe)?;
        let needed = [opcode::PollAdd::CODE, opcode::AsyncCancel::CODE];
        let params = ring.0.params();
        if needed.iter().all(|code| probe.is_supported(*code))
            && params.is_feature_ext_arg()
            && params.is_feature_nodrop()
            && params.is_feature_skip_cqe_on_success()
        {
            Ok(())
        } else {
            Err(Errno::OPNOTSUPP.into())
        }
    }

    pub(crate) fn new() -> io::Result<Self> {
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_submit_all()
            .setup_clamp()
            .setup_cqsize(COMPLETIONS)
            .build(ENTRIES)?;
        ring.submitter()
            .register_iowq_max_workers(&mut WORKERS_MAX.clone())?;
        Ok(Self(ring))
    }

    /// Watches `fd` until cancelled (`multi`) or until the first event. The kernel resolves the descriptor at submission. A
    /// descriptor closed before that is reported as an error, or its reused number is watched until cancelled.
    pub(crate) fn watch(
        &mut self,
        fd: BorrowedFd<'_>,
        poll_flags: u32,
        multi: bool,
        user_data: u64,
    ) -> io::Result<()> {
        let entry = opcode::PollAdd::new(Fd(fd.as_raw_fd()), poll_flags)
            .multi(multi)
            .build()
            .user_data(user_data);
        self.push(&entry)
    }

    /// Ends a watch; its last completion still follows. The cancel itself completes only if it found no watch, with
    /// user data `own`.
    pub(crate) fn cancel(&mut self, user_data: u64, own: u64) -> io::Result<()> {
        let entry = opcode::AsyncCancel::new(user_data)
            .build()
            .flags(squeue::Flags::SKIP_SUCCESS)
            .user_data(own);
        self.push(&entry)
    }

    fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        if self.0.submission().is_full() {
            self.0.submit()?;
        }
        // SAFETY: every entry comes from `watch` or `cancel` above. Polls and cancels carry no pointer, so there is
        // no memory that would have to stay valid until they complete.
        let pushed = unsafe { self.0.submission().push(entry) };
        pushed.map_err(|_full| Errno::BUSY.into())
    }

    /// Submits the collected entries and waits for a completion: without limit, or at most `timeout`; zero does not
    /// wait. Returns whether the kernel was entered.
    pub(crate) fn enter(&mut self, timeout: Option<Duration>) -> io::Result<bool> {
        let entered = match timeout {
            None => self.0.submit_and_wait(1),
            Some(Duration::ZERO) => {
                let queue = self.0.submission();
                if queue.is_empty() && !queue.taskrun() && !queue.cq_overflow() {
                    return Ok(false); // Nothing to submit, and no completions pending in the kernel.
                }
                drop(queue);
                self.0.submit()
            }
            Some(limit) => {
                let limit = Timespec::from(limit);
                let args = SubmitArgs::new().timespec(&limit);
                self.0.submitter().submit_with_args(1, &args)
            }
        };
        match entered {
            Ok(_count) => Ok(true),
            Err(error) => match Errno::from_io_error(&error) {
                // A signal, the timeout, or a full completion queue: the caller takes completions and calls again.
                Some(Errno::INTR | Errno::TIME | Errno::BUSY | Errno::AGAIN) => Ok(true),
                _ => Err(error),
            },
        }
    }

    /// Takes all available completions.
    pub(crate) fn take(&mut self, into: &mut Vec<Completion>) {
        into.extend(self.0.completion().map(|entry| Completion {
            user_data: entry.user_data(),
            result: entry.result(),
            more: cqueue::more(entry.flags()),
        }));
    }
}
