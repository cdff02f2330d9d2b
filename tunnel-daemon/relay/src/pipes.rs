//! Pipes of one thread, within a budget of kernel memory.

use std::{io, os::fd::OwnedFd};

use crate::syscall::pipe;

/// With smaller pipes splice is slower than copy: 16 slots of one packet each hold about 23 KB.
const USEFUL_BYTES: usize = 64 * 1024;

/// Both ends of one pipe.
#[derive(Debug)]
pub(crate) struct Pipe {
    pub(crate) reader: OwnedFd,
    pub(crate) writer: OwnedFd,
    pub(crate) capacity: usize,
}

/// Free pipes, and the number of lent pipes.
#[derive(Debug)]
pub(crate) struct Pipes {
    free: Vec<Pipe>,
    lent: usize,
    pipe_bytes: usize,
    open_max: usize,
    exhausted: u64,
}

impl Pipes {
    /// A pool of at most `budget_bytes` in pipes of `pipe_bytes` each.
    pub(crate) fn new(pipe_bytes: usize, budget_bytes: usize) -> Self {
        Self {
            free: Vec::new(),
            lent: 0,
            pipe_bytes,
            open_max: budget_bytes / pipe_bytes.max(1),
            exhausted: 0,
        }
    }

    /// Lends an empty pipe; `None` if the budget or the kernel's limit is used up.
    pub(crate) fn lend(&mut self) -> Option<Pipe> {
        let pipe = match self.free.pop() {
            Some(pipe) => Some(pipe),
            None if self.lent < self.open_max => Self::open(self.pipe_bytes).ok().flatten(),
            None => None,
        };
        match &pipe {
            Some(_) => self.lent += 1,
            None => self.exhausted += 1,
        }
        pipe
    }

    fn open(bytes: usize) -> io::Result<Option<Pipe>> {
        let (reader, writer) = pipe::open()?;
        // Beyond the user's limit the kernel refuses to grow a pipe, or creates a smaller one. So the actual capacity is
        // queried.
        let _refused = pipe::resize(&writer, bytes);
        let capacity = pipe::capacity(&writer)?;
        Ok((capacity >= USEFUL_BYTES).then_some(Pipe {
            reader,
            writer,
            capacity,
        }))
    }

    /// Takes back a pipe. A pipe that still holds bytes of the ended connection is closed.
    pub(crate) fn take_back(&mut self, pipe: Pipe, is_empty: bool) {
        self.lent -= 1;
        if is_empty {
            self.free.push(pipe);
        }
    }

    pub(crate) fn lent(&self) -> usize {
        self.lent
    }

    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// How often no pipe could be lent since the last call.
    pub(crate) fn take_exhausted(&mut self) -> u64 {
        std::mem::take(&mut self.exhausted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Limit (memory): Kernel pipes of the relay | 48 MiB per process, or one pipe of 256 KiB per ten raw lanes if that
    /// is less
    #[test]
    #[cfg_attr(miri, ignore = "the kernel sizes pipes")]
    fn budget_caps_the_pool_and_each_refusal_counts() {
        let mut pipes = Pipes::new(64 * 1024, 128 * 1024);
        let one = pipes.lend().unwrap();
        let _two = pipes.lend().unwrap();
        assert!(pipes.lend().is_none());
        assert_eq!((pipes.lent(), pipes.take_exhausted()), (2, 1));
        pipes.take_back(one, true);
        assert!(pipes.lend().is_some());
    }

    #[test]
    #[cfg_attr(miri, ignore = "the kernel sizes pipes")]
    fn pipe_that_holds_bytes_is_not_used_again() {
        let mut pipes = Pipes::new(64 * 1024, 64 * 1024);
        let one = pipes.lend().unwrap();
        pipes.take_back(one, false);
        assert_eq!((pipes.lent(), pipes.free()), (0, 0));
    }

    #[test]
    #[cfg_attr(miri, ignore = "the kernel sizes pipes")]
    fn pipe_too_small_to_help_is_refused() {
        assert!(Pipes::open(4096).unwrap().is_none());
    }
    #[test]
    fn free_pipe_is_lent_before_another_is_opened() {
        let mut pipes = Pipes::new(64 * 1024, 0); // Allows no pipe to be opened.
        let (reader, writer) = io::pipe().unwrap();
        pipes.lent = 1;
        let one = Pipe {
            reader: reader.into(),
            writer: writer.into(),
            capacity: 64 * 1024,
        };
        pipes.take_back(one, true);
        assert_eq!((pipes.lent(), pipes.free()), (0, 1));
        let again = pipes.lend().unwrap();
        assert!(pipes.lend().is_none());
        assert_eq!((pipes.lent(), pipes.take_exhausted()), (1, 1));
        pipes.take_back(again, false);
        assert_eq!((pipes.lent(), pipes.free()), (0, 0));
    }
}
