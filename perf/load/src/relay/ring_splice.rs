//! The cost of splicing by the ring: `IORING_OP_SPLICE` from socket to pipe, then from pipe to socket, each direction on its
//! own. The kernel runs every splice on an io-wq thread. Each connection creates two pipes, which is most of the cost of a dial
//! here.
#![expect(
    unsafe_code,
    reason = "a measurement: submission entries name descriptors that have to stay open"
)]

use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::{Arc, mpsc};

use anyhow::Context as _;
use io_uring::types::Fd;
use io_uring::{IoUring, opcode, squeue};
use rustix::event::{EventfdFlags, eventfd};
use rustix::pipe::{fcntl_setpipe_size, pipe};

use super::{BUFFER_BYTES, Connections, WAITING_MAX, in_thread};

/// Submissions between two system calls.
const ENTRIES: u32 = 1024;
/// Completion queue entries: two for each connection of any measurement.
const COMPLETIONS: u32 = 8192;
/// User data of the read that waits for new connections.
const BELL: u64 = u64::MAX;
/// The two directions of a connection.
const DIRECTIONS: usize = 2;

/// Bytes from one socket to the other.
struct Direction {
    read: OwnedFd,
    write: OwnedFd,
    /// Bytes in the pipe.
    filled: u32,
    is_over: bool,
}

/// Dropped when both directions are over: no entry then refers to its descriptors.
struct Connection {
    /// Direction 0 goes from the first socket to the second.
    sockets: [TcpStream; DIRECTIONS],
    directions: [Direction; DIRECTIONS],
}

/// Starts the thread.
///
/// # Errors
/// A thread or ring is not available.
pub(super) fn start() -> anyhow::Result<Connections> {
    let ring = IoUring::builder()
        .setup_cqsize(COMPLETIONS)
        .build(ENTRIES)
        .context("setting a ring up")?;
    let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).context("making an eventfd")?);
    let (connections, received) = mpsc::sync_channel(WAITING_MAX);
    let rung = Arc::clone(&bell);
    in_thread(move || {
        let mut relay = Relay {
            ring,
            bell: rung,
            count: Box::new([0; 8]),
            received,
            connections: Vec::new(),
        };
        if let Err(error) = relay.run() {
            eprintln!("adit-load relay: {error}");
            // Exit without dropping: the ring may still write to the bell's buffer, and measurements need this loop.
            std::process::exit(1);
        }
    })?;
    Ok(Box::new(move |client, target| {
        connections
            .send([client, target])
            .map_err(io::Error::other)?;
        rustix::io::write(&*bell, &1u64.to_ne_bytes())?;
        Ok(())
    }))
}

struct Relay {
    ring: IoUring,
    bell: Arc<OwnedFd>,
    /// Buffer of the ring's read from the bell.
    count: Box<[u8; 8]>,
    received: mpsc::Receiver<[TcpStream; 2]>,
    connections: Vec<Option<Connection>>,
}

impl Relay {
    fn run(&mut self) -> io::Result<()> {
        self.listen_for_the_bell()?;
        let mut completions = Vec::new();
        loop {
            self.ring.submit_and_wait(1)?;
            let completed = self.ring.completion();
            completions.extend(completed.map(|entry| (entry.user_data(), entry.result())));
            for (whose, result) in completions.drain(..) {
                if whose == BELL {
                    self.listen_for_the_bell()?;
                    while let Ok(sockets) = self.received.try_recv() {
                        self.begin(sockets)?;
                    }
                } else {
                    self.moved(usize::try_from(whose).unwrap_or(usize::MAX), result)?;
                }
            }
        }
    }

    fn listen_for_the_bell(&mut self) -> io::Result<()> {
        let length = u32::try_from(self.count.len()).unwrap_or(u32::MAX);
        let into = self.count.as_mut_ptr();
        let read = opcode::Read::new(Fd(self.bell.as_raw_fd()), into, length).build();
        self.submit(&read.user_data(BELL))
    }

    fn begin(&mut self, sockets: [TcpStream; DIRECTIONS]) -> io::Result<()> {
        let direction = || -> io::Result<Direction> {
            let (read, write) = pipe()?;
            fcntl_setpipe_size(&write, BUFFER_BYTES)?;
            Ok(Direction {
                read,
                write,
                filled: 0,
                is_over: false,
            })
        };
        let connection = Connection {
            sockets,
            directions: [direction()?, direction()?],
        };
        let free = self.connections.iter().position(Option::is_none);
        let place = free.unwrap_or_else(|| {
            self.connections.push(None);
            self.connections.len() - 1
        });
        self.connections[place] = Some(connection);
        (0..DIRECTIONS).try_for_each(|direction| self.go_on(place * DIRECTIONS + direction))
    }

    /// A splice of direction `number` has completed.
    fn moved(&mut self, number: usize, result: i32) -> io::Result<()> {
        let place = number / DIRECTIONS;
        let Some(connection) = self.connections.get_mut(place).and_then(Option::as_mut) else {
            return Ok(());
        };
        let direction = &mut connection.directions[number % DIRECTIONS];
        let count = u32::try_from(result).unwrap_or(0);
        let into = &connection.sockets[(number + 1) % DIRECTIONS];
        match (direction.filled, count) {
            // End of the stream, by EOF or by an error.
            (0, 0) => {
                direction.is_over = true;
                let end = if result == 0 {
                    Shutdown::Write
                } else {
                    Shutdown::Both
                };
                let _gone = into.shutdown(end);
            }
            (0, read) => direction.filled = read,
            // The sender must see that its bytes are not taken.
            (_, 0) => {
                direction.is_over = true;
                let from = &connection.sockets[number % DIRECTIONS];
                let _gone = from.shutdown(Shutdown::Both);
            }
            (_, written) => direction.filled -= written.min(direction.filled),
        }
        if connection.directions.iter().all(|one| one.is_over) {
            self.connections[place] = None;
            return Ok(());
        }
        self.go_on(number)
    }

    /// Submits the next splice of direction `number`, if there is one.
    fn go_on(&mut self, number: usize) -> io::Result<()> {
        let place = self.connections.get(number / DIRECTIONS);
        let Some(connection) = place.and_then(Option::as_ref) else {
            return Ok(());
        };
        let direction = &connection.directions[number % DIRECTIONS];
        if direction.is_over {
            return Ok(());
        }
        let (from, to, length) = if direction.filled == 0 {
            let socket = &connection.sockets[number % DIRECTIONS];
            let most = u32::try_from(BUFFER_BYTES).unwrap_or(u32::MAX);
            (socket.as_raw_fd(), direction.write.as_raw_fd(), most)
        } else {
            let socket = &connection.sockets[(number + 1) % DIRECTIONS];
            (
                direction.read.as_raw_fd(),
                socket.as_raw_fd(),
                direction.filled,
            )
        };
        let splice = opcode::Splice::new(Fd(from), -1, Fd(to), -1, length)
            .flags(libc::SPLICE_F_MOVE)
            .build();
        self.submit(&splice.user_data(number as u64))
    }

    fn submit(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        if self.ring.submission().is_full() {
            self.ring.submit()?;
        }
        // SAFETY: descriptors and the bell's buffer live until the entry has completed: a connection is dropped when both of
        // its directions are over, each of which has at most one entry and none once it is; the rest lives as long as the process.
        let pushed = unsafe { self.ring.submission().push(entry) };
        pushed.map_err(io::Error::other)
    }
}
