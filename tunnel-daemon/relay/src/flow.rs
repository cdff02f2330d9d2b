//! A pair owned by a relay thread: its sockets, its two directions, and the handling of their events.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU64, Ordering::Relaxed},
    },
};

use rustix::io::Errno;

use crate::{
    buffers::Buffers,
    config::Thresholds,
    direction::{Direction, Io, Step},
    driver::Event,
    kernel_tls::{self, KernelTls},
    outcome::{Op, PairEnd, Side},
    pair::{Job, Promise, Shared},
    pipes::{Pipe, Pipes},
    syscall::{pipe, socket},
};

/// Pools that the pairs of one thread share.
#[derive(Debug)]
pub(crate) struct Pools {
    pub(crate) buffers: Buffers,
    pub(crate) pipes: Pipes,
    pub(crate) syscalls: u64,
}

/// What to do with a pair after its turn.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// Wait for events, and for room on the flagged sides.
    Wait { room_on: [bool; 2] },
    /// Give the pair another turn.
    Again { room_on: [bool; 2] },
    /// The pair is over.
    Over(PairEnd),
}

/// An adopted pair.
pub(crate) struct OpenPair {
    sockets: [Arc<OwnedFd>; 2],
    /// By source: the first reads from side a.
    directions: [Direction<Pipe>; 2],
    /// kTLS state of side b.
    tls: Option<KernelTls>,
    /// Sides that reported an error which no read has returned yet.
    suspect: [bool; 2],
    broken: Option<(Side, io::Error)>,
    /// The pair is in the thread's list of pairs with work.
    pub(crate) is_queued: bool,
    shared: Arc<Shared>,
    promise: Promise,
}

impl OpenPair {
    pub(crate) fn new(job: Job, rules: &Thresholds) -> Self {
        let Job { pair, promise } = job;
        let shared = Arc::clone(promise.shared());
        let broken = [(Side::A, &pair.a), (Side::B, &pair.b)]
            .into_iter()
            .find_map(|(side, fd)| Some((side, socket::set_nonblocking(fd).err()?)));
        let sockets = [Arc::new(pair.a), Arc::new(pair.b)];
        let mut directions = [
            Direction::new(pair.to_b, rules),
            Direction::new(pair.to_a, rules),
        ];
        if pair.tls.is_some() {
            let [to_b, to_a] = &mut directions;
            to_a.read_by_record();
            if !rules.splice_into_tls {
                to_b.never_splice();
            }
        }
        // Set once, because a pair is adopted once.
        let _first = shared.sockets.set(sockets.each_ref().map(Arc::downgrade));
        Self {
            sockets,
            directions,
            tls: pair.tls,
            suspect: [false; 2],
            broken,
            is_queued: false,
            shared,
            promise,
        }
    }

    pub(crate) fn socket(&self, side: Side) -> BorrowedFd<'_> {
        self.sockets[side.index()].as_fd()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Records an event.
    pub(crate) fn note(&mut self, event: &Event) {
        let side = event.side;
        if event.readable {
            self.directions[side.index()].source_ready(event.ends);
        }
        match event.urgent {
            Some(true) => self.directions[side.index()].source_is_urgent(),
            Some(false) => (),
            None if event.readable => self.directions[side.index()].source_may_be_urgent(),
            None => (),
        }
        if event.room {
            self.directions[side.other().index()].sink_ready();
        }
        self.suspect[side.index()] |= event.error;
        if let Some(errno) = event.failure {
            self.fail(side, io::Error::from_raw_os_error(errno));
        }
    }

    /// The pair cannot be watched; its next turn ends the pair.
    pub(crate) fn fail(&mut self, side: Side, error: io::Error) {
        self.broken.get_or_insert((side, error));
    }

    /// Gives both directions a turn.
    pub(crate) fn run(&mut self, pools: &mut Pools, rules: &Thresholds) -> Verdict {
        if let Some((side, error)) = self.broken.take() {
            return Verdict::Over(PairEnd::Failed {
                side,
                op: Op::Read,
                error,
            });
        }
        let mut again = [false; 2];
        let mut room_on = [false; 2];
        for source in [Side::A, Side::B] {
            let sink = source.other();
            match self.run_from(source, pools, rules) {
                Step::Idle | Step::Done => {}
                Step::Blocked => room_on[sink.index()] = true,
                Step::Again => again[source.index()] = true,
                Step::Failed(op, error) => {
                    let side = match op {
                        Op::Read => source,
                        Op::Write => sink,
                    };
                    return Verdict::Over(PairEnd::Failed { side, op, error });
                }
            }
        }
        self.report_ends();
        if self.directions.iter().all(Direction::is_done) {
            return Verdict::Over(PairEnd::Finished);
        }
        // A read would return the error, but none may follow: the other side is full or the socket idle. So query the error.
        for side in [Side::A, Side::B] {
            if self.suspect[side.index()] && !again[side.index()] {
                self.suspect[side.index()] = false;
                pools.syscalls += 1;
                if let Some(error) = socket::take_error(self.socket(side)) {
                    let op = Op::Read;
                    return Verdict::Over(PairEnd::Failed { side, op, error });
                }
            }
        }
        if again.contains(&true) {
            Verdict::Again { room_on }
        } else {
            Verdict::Wait { room_on }
        }
    }

    /// Publishes EOFs as soon as they are known: the other side may never take the bytes before an EOF.
    fn report_ends(&self) {
        let ended = self.directions.iter().filter(|one| one.source_has_ended());
        // At most two.
        let ended = u8::try_from(ended.count()).unwrap_or(u8::MAX);
        self.shared.ended.store(ended, Relaxed);
    }

    fn run_from(&mut self, source: Side, pools: &mut Pools, rules: &Thresholds) -> Step {
        let sink = source.other();
        let mut io = Sockets {
            source: self.sockets[source.index()].as_fd(),
            sink: self.sockets[sink.index()].as_fd(),
            delivered: match sink {
                Side::A => &self.shared.to_a,
                Side::B => &self.shared.to_b,
            },
            finished: &self.shared.finished,
            spliced: &self.shared.spliced,
            tls: match (&mut self.tls, sink) {
                (None, _) => Tls::Neither,
                (Some(tls), Side::A) => Tls::Source(tls),
                (Some(tls), Side::B) => Tls::Sink(tls),
            },
            pools,
        };
        self.directions[source.index()].run(&mut io, rules)
    }

    /// Returns buffers and pipes, closes the sockets and calls `done`.
    pub(crate) fn close(mut self, end: PairEnd, pools: &mut Pools) {
        let [a, b] = &self.sockets;
        for (direction, source, sink) in [(0, a, b), (1, b, a)] {
            self.directions[direction].release(&mut Sockets {
                source: source.as_fd(),
                sink: sink.as_fd(),
                delivered: &self.shared.to_a,
                finished: &self.shared.finished,
                spliced: &self.shared.spliced,
                tls: Tls::Neither, // No bytes are moved.
                pools,
            });
        }
        self.abandon(end);
    }

    /// As [`Self::close`], without the thread's pools, which may be inconsistent after a panic.
    ///
    /// Resets the sockets unless the pair has finished, so that no peer takes a truncated stream for a complete one.
    /// SO_LINGER was set for RST at submission, which also covers a killed process; here it is cleared for finished pairs.
    pub(crate) fn abandon(self, end: PairEnd) {
        let [to_b, to_a] = self.directions.each_ref().map(Direction::flow);
        for fd in self.sockets {
            if matches!(end, PairEnd::Finished) {
                // Fails if the socket is already reset.
                let _reset_already = socket::end_on_close(&fd);
            }
        }
        self.promise.keep(to_a, to_b, end);
    }
}

/// Two sockets and the thread's pools, for one turn of one direction.
struct Sockets<'a> {
    source: BorrowedFd<'a>,
    sink: BorrowedFd<'a>,
    delivered: &'a AtomicU64,
    finished: &'a AtomicU8,
    spliced: &'a AtomicU8,
    tls: Tls<'a>,
    pools: &'a mut Pools,
}

/// Which of the two sockets has kTLS.
enum Tls<'a> {
    Neither,
    Source(&'a mut KernelTls),
    Sink(&'a mut KernelTls),
}

impl Tls<'_> {
    /// # Errors
    /// The sink's keys have reached their record limit.
    fn check_sink(&self) -> io::Result<()> {
        match self {
            Self::Sink(tls) => tls.check(),
            Self::Neither | Self::Source(_) => Ok(()),
        }
    }
}

impl Io for Sockets<'_> {
    type Pipe = Pipe;

    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.pools.syscalls += 1;
        match &mut self.tls {
            Tls::Source(tls) => tls.receive(self.source, into),
            Tls::Neither | Tls::Sink(_) => socket::receive(self.source, into),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.tls.check_sink()?;
        self.pools.syscalls += 1;
        let sent = socket::send(self.sink, bytes)?;
        if let Tls::Sink(tls) = &mut self.tls {
            tls.sent(sent);
        }
        Ok(sent)
    }

    fn fill(&mut self, pipe: &Pipe) -> io::Result<usize> {
        self.pools.syscalls += 1;
        let filled = pipe::transfer(self.source, &pipe.writer, pipe.capacity);
        match (filled, &mut self.tls) {
            // An empty record or EOF: a read finds out.
            (Ok(0), Tls::Source(_)) => Err(Errno::INVAL.into()),
            (Err(error), Tls::Source(tls)) => {
                tls.refused(&error);
                Err(error)
            }
            (filled, _) => filled,
        }
    }

    fn drain(&mut self, pipe: &Pipe, held: usize) -> io::Result<usize> {
        self.tls.check_sink()?;
        self.pools.syscalls += 1;
        let sent = pipe::transfer(&pipe.reader, self.sink, held)?;
        if let Tls::Sink(tls) = &mut self.tls {
            tls.spliced(sent);
        }
        Ok(sent)
    }

    fn unload(&mut self, pipe: &Pipe, into: &mut [u8]) -> io::Result<usize> {
        self.pools.syscalls += 1;
        socket::read_pipe(&pipe.reader, into)
    }

    fn finish(&mut self) -> io::Result<()> {
        self.pools.syscalls += 1;
        if let Tls::Sink(_) = self.tls {
            kernel_tls::send_close_notify(self.sink)?;
            self.finished.fetch_add(1, Relaxed);
            return Ok(());
        }
        self.finished.fetch_add(1, Relaxed);
        // A reset socket returns "not connected"; report the reset instead.
        socket::finish_writing(self.sink)
            .map_err(|error| socket::take_error(self.sink).unwrap_or(error))
    }

    fn progress(&mut self, delivered: u64) {
        self.delivered.store(delivered, Relaxed);
    }

    fn capacity(pipe: &Pipe) -> usize {
        pipe.capacity
    }

    fn lend_pipe(&mut self) -> Option<Pipe> {
        let pipe = self.pools.pipes.lend()?;
        self.spliced.store(1, Relaxed);
        Some(pipe)
    }

    fn return_pipe(&mut self, pipe: Pipe, is_empty: bool) {
        self.pools.pipes.take_back(pipe, is_empty);
    }

    fn lend_buffer(&mut self, size: usize) -> Vec<u8> {
        self.pools.buffers.lend(size)
    }

    fn return_buffer(&mut self, buffer: Vec<u8>) {
        self.pools.buffers.take_back(buffer);
    }
}
