//! What registered files would do for the ring driver: the life of polls on 64 pairs of unix sockets in one turn, by
//! descriptor and by registered file. A measurement, not part of the product.
#![expect(
    unsafe_code,
    reason = "a measurement: an update of registered files names raw memory"
)]

use std::{io::Write, os::fd::AsRawFd, os::unix::net::UnixStream, time::Instant};

use io_uring::{
    IoUring, opcode, squeue,
    types::{Fd, Fixed},
};

const PAIRS: u32 = 64;
const SOCKETS: u32 = 2 * PAIRS;
const ROUNDS: usize = 2000;
const READABLE: u32 = libc::POLLIN as u32 | libc::POLLRDHUP as u32;
const OTHER: u64 = u64::MAX;

/// How the kernel is told of a socket.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    Descriptor,
    /// Registered by a call for each pair, before its polls are handed in.
    FileByCall,
    /// Registered by an entry for each pair, handed in with its polls.
    FileByEntry,
}

const ALL: [(By, &str); 3] = [
    (By::Descriptor, "descriptor"),
    (By::FileByCall, "registered file, a call for each pair"),
    (By::FileByEntry, "registered file, an entry for each pair"),
];
const PHASES: usize = 4;

struct Rig {
    by: By,
    ring: IoUring,
    ours: Vec<UnixStream>,
    peers: Vec<UnixStream>,
    descriptors: Vec<i32>,
    /// Nanoseconds for one pair, by phase.
    times: [Vec<f64>; PHASES],
}

impl Rig {
    fn new(by: By) -> Self {
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_submit_all()
            .setup_cqsize(4 * 512)
            .build(512)
            .expect("a ring");
        if by != By::Descriptor {
            let registered = ring.submitter().register_files_sparse(SOCKETS);
            registered.expect("a table of files");
        }
        let (ours, peers): (Vec<_>, Vec<_>) = (0..SOCKETS)
            .map(|_| UnixStream::pair().expect("a socket pair"))
            .unzip();
        let descriptors = ours.iter().map(AsRawFd::as_raw_fd).collect();
        Self {
            by,
            ring,
            ours,
            peers,
            descriptors,
            times: Default::default(),
        }
    }

    fn push(&mut self, entry: squeue::Entry, user_data: u64) {
        // SAFETY: polls and cancels name no memory; an update names a part of `descriptors` or of a constant, and both
        // outlive the `hand_in` that completes it.
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(user_data)) };
        pushed.expect("room for a whole turn");
    }

    fn poll(&mut self, socket: u32, flags: u32, multi: bool) {
        let entry = match self.by {
            By::Descriptor => {
                let fd = Fd(self.descriptors[socket as usize]);
                opcode::PollAdd::new(fd, flags).multi(multi).build()
            }
            By::FileByCall | By::FileByEntry => opcode::PollAdd::new(Fixed(socket), flags)
                .multi(multi)
                .build(),
        };
        self.push(entry, u64::from(socket) | u64::from(!multi) << 32);
    }

    /// Registers both sockets of a pair, or forgets them.
    fn update(&mut self, pair: u32, present: bool) {
        const NONE: [i32; 2] = [-1; 2];
        let at = 2 * pair as usize;
        let files: &[i32] = if present {
            &self.descriptors[at..at + 2]
        } else {
            &NONE
        };
        match self.by {
            By::Descriptor => {}
            By::FileByCall => {
                let submitter = self.ring.submitter();
                submitter
                    .register_files_update(2 * pair, files)
                    .expect("known");
            }
            By::FileByEntry => {
                let entry = opcode::FilesUpdate::new(files.as_ptr(), 2).offset(2 * pair as i32);
                let entry = entry.build().flags(squeue::Flags::SKIP_SUCCESS);
                self.push(entry, OTHER);
            }
        }
    }

    /// One call, as the driver waits; says how many polls reported.
    fn hand_in(&mut self, wait_for: usize) -> usize {
        self.ring.submit_and_wait(wait_for).expect("a call");
        let polls = self
            .ring
            .completion()
            .filter(|entry| entry.user_data() != OTHER);
        polls.count()
    }

    fn round(&mut self) {
        let start = Instant::now();
        for pair in 0..PAIRS {
            self.update(pair, true);
            self.poll(2 * pair, READABLE, true);
            self.poll(2 * pair + 1, READABLE, true);
        }
        assert_eq!(self.hand_in(0), 0);
        self.note(0, start);

        for peer in &mut self.peers {
            peer.write_all(b"x").expect("room");
        }
        let start = Instant::now();
        assert_eq!(self.hand_in(SOCKETS as usize), SOCKETS as usize);
        self.note(1, start);
        for ours in &mut self.ours {
            std::io::Read::read_exact(ours, &mut [0]).expect("a byte");
        }

        let start = Instant::now();
        for socket in 0..SOCKETS {
            self.poll(socket, libc::POLLOUT as u32, false);
        }
        assert_eq!(self.hand_in(SOCKETS as usize), SOCKETS as usize);
        self.note(2, start);

        let start = Instant::now();
        for pair in 0..PAIRS {
            for socket in [2 * pair, 2 * pair + 1] {
                let entry = opcode::AsyncCancel::new(u64::from(socket)).build();
                self.push(entry.flags(squeue::Flags::SKIP_SUCCESS), OTHER);
            }
            self.update(pair, false);
        }
        assert_eq!(self.hand_in(SOCKETS as usize), SOCKETS as usize);
        self.note(3, start);
    }

    fn note(&mut self, phase: usize, start: Instant) {
        let each = start.elapsed().as_secs_f64() * 1e9 / f64::from(PAIRS);
        self.times[phase].push(each);
    }
}

/// Rounds of all ways alternate. Best, quartiles and median are printed, for one pair of sockets in each phase.
pub(crate) fn print() {
    let mut rigs = ALL.map(|(by, _name)| Rig::new(by));
    for _ in 0..ROUNDS {
        rigs.iter_mut().for_each(Rig::round);
    }
    println!(
        "| ns for a pair: least, quarter, median, three quarters | adopt | event | room | remove |"
    );
    println!("| --- | --- | --- | --- | --- |");
    for (rig, (_by, name)) in rigs.iter_mut().zip(ALL) {
        print!("| {name} |");
        for phase in 0..PHASES {
            let times = &mut rig.times[phase];
            times.sort_by(f64::total_cmp);
            let at = |part: usize| times[part * (times.len() - 1) / 4];
            print!(" {:.0}, {:.0}, {:.0}, {:.0} |", at(0), at(1), at(2), at(3));
        }
        println!();
    }
}
