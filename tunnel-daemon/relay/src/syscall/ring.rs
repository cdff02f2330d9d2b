//! An io_uring that only watches descriptors. Its entries name no memory of ours, so nothing has to outlive them.

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

/// Submissions gathered before a turn ends. More are handed in at once.
const ENTRIES: u32 = 256;
/// Completions the kernel keeps before it falls back to a list of its own: four for each submission.
const COMPLETIONS: u32 = 4 * ENTRIES;
/// No operation of ours should reach a kernel worker; if one does, it must not be thousands.
const WORKERS_MAX: [u32; 2] = [1, 4];

/// What the kernel reports about one watch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Completion {
    pub(crate) user_data: u64,
    /// Poll flags, or a negative errno.
    pub(crate) result: i32,
    /// Whether the watch goes on.
    pub(crate) more: bool,
}

/// One ring, used by the thread that made it.
pub(crate) struct Ring(IoUring);

impl Ring {
    /// Makes a ring and drops it, to learn whether this host allows what [`Self::new`] needs.
    ///
    /// On a thread of its own: the kernel takes a ring down later, and interrupts a blocking call of the thread that
    /// made it to do so. A `recv` with a timeout then fails with EINTR.
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

    /// Watches `fd` until cancelled (`multi`) or until the first event. The kernel looks the number up when the entry
    /// is handed in: a descriptor closed before that is reported as such, or cancelled with its successor.
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

    /// Ends a watch; its last completion still comes. A cancel itself completes only when it found nothing, as `own`.
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

    /// Hands in what was gathered and waits for a completion: for ever, or until `timeout`, where zero means not at
    /// all. Says whether the kernel was entered.
    pub(crate) fn enter(&mut self, timeout: Option<Duration>) -> io::Result<bool> {
        let entered = match timeout {
            None => self.0.submit_and_wait(1),
            Some(Duration::ZERO) => {
                let queue = self.0.submission();
                if queue.is_empty() && !queue.taskrun() && !queue.cq_overflow() {
                    return Ok(false); // Nothing to hand in, and the kernel has nothing to tell.
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
                // A signal, the timeout, or completions to be taken first: the caller takes them and comes again.
                Some(Errno::INTR | Errno::TIME | Errno::BUSY | Errno::AGAIN) => Ok(true),
                _ => Err(error),
            },
        }
    }

    /// Takes all completions that are there.
    pub(crate) fn take(&mut self, into: &mut Vec<Completion>) {
        into.extend(self.0.completion().map(|entry| Completion {
            user_data: entry.user_data(),
            result: entry.result(),
            more: cqueue::more(entry.flags()),
        }));
    }
}
