//! What a ring could do for chatty connections beyond readiness: multishot receives into provided buffers, and sends
//! gathered into the one call that waits, with plain descriptors or such as the ring has registered (direct ones). Measured
//! rows, not part of the product: no half-close, no errors, no bounds.
#![expect(
    unsafe_code,
    reason = "a measurement: submission entries and a buffer ring name raw memory"
)]

use std::{
    alloc::{Layout, alloc_zeroed},
    collections::VecDeque,
    os::fd::AsRawFd,
    sync::{
        Arc,
        atomic::{AtomicU16, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
};

use io_uring::{
    IoUring, cqueue, opcode, squeue,
    types::{BufRingEntry, Fd, Fixed},
};
use socket2::Socket;

pub(crate) const BUFFERS: u16 = 256;
const SIZE: u32 = 16 * 1024;
pub(crate) const GROUP: u16 = 0;
pub(crate) const SEND: u64 = 1 << 32;

/// Memory the kernel receives into. Never freed: a ring is taken down at a time of the kernel's choosing.
pub(crate) struct Pool {
    entries: *mut BufRingEntry,
    bytes: *mut u8,
    tail: u16,
}

impl Pool {
    pub(crate) fn new(ring: &IoUring) -> Self {
        let entries = size_of::<BufRingEntry>() * usize::from(BUFFERS);
        let layout = |size| Layout::from_size_align(size, 4096).expect("a small layout");
        // SAFETY: the layout has a size above zero.
        let entries = unsafe { alloc_zeroed(layout(entries)) }.cast();
        // SAFETY: the layout has a size above zero.
        let bytes = unsafe { alloc_zeroed(layout(SIZE as usize * usize::from(BUFFERS))) };
        let mut pool = Self {
            entries,
            bytes,
            tail: 0,
        };
        // SAFETY: the entries are page aligned, as many as said, and never freed.
        let registered = unsafe {
            ring.submitter()
                .register_buf_ring_with_flags(entries as u64, BUFFERS, GROUP, 0)
        };
        registered.expect("a buffer ring");
        (0..BUFFERS).for_each(|id| pool.give(id));
        pool
    }

    fn at(&self, id: u16) -> *mut u8 {
        self.bytes.wrapping_add(usize::from(id) * SIZE as usize)
    }

    /// What a completion says the kernel has put into a buffer, until it is given back.
    pub(crate) fn bytes(&self, id: u16, count: u32) -> &[u8] {
        assert!(id < BUFFERS && count <= SIZE);
        // SAFETY: so many bytes are inside of the buffer, which was set to zero and is never freed. The kernel writes to
        // it no more once it has completed a receive with it, until it is given back, and that takes `&mut self`.
        unsafe { std::slice::from_raw_parts(self.at(id), count as usize) }
    }

    pub(crate) fn give(&mut self, id: u16) {
        let place = self.entries.wrapping_add(usize::from(self.tail % BUFFERS));
        // SAFETY: the place is inside the entries allocated above, and the kernel reads it only below the tail.
        let entry = unsafe { &mut *place };
        entry.set_addr(self.at(id) as u64);
        entry.set_len(SIZE);
        entry.set_bid(id);
        self.tail = self.tail.wrapping_add(1);
        // SAFETY: the entries are those of a registered ring, which has its tail in the first of them.
        let tail = unsafe { BufRingEntry::tail(self.entries) };
        // SAFETY: the tail is a field the kernel reads and never writes; it is aligned and lives for ever.
        let tail = unsafe { AtomicU16::from_ptr(tail.cast_mut()) };
        tail.store(self.tail, Ordering::Release);
    }
}

/// How entries name their sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Named {
    Plain,
    Direct,
}

/// Relays until the first socket ends. `calls` counts entries into the kernel.
pub(crate) fn start(sockets: Vec<Socket>, named: Named, calls: Arc<AtomicU64>) -> JoinHandle<()> {
    thread::Builder::new()
        .name("relay-ring".to_owned())
        .spawn(move || run(&sockets, named, &calls))
        .expect("a thread")
}

pub(crate) fn ring() -> IoUring {
    IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_submit_all()
        .setup_cqsize(2048)
        .build(512)
        .expect("a ring")
}

/// Sockets 2n and 2n+1 are a pair.
fn run(sockets: &[Socket], named: Named, calls: &AtomicU64) {
    let mut ring = ring();
    let mut pool = Pool::new(&ring);
    let plain = |at: usize| Fd(sockets[at].as_raw_fd());
    let direct = |at: usize| Fixed(u32::try_from(at).expect("some hundred sockets"));
    if named == Named::Direct {
        let files: Vec<_> = sockets.iter().map(AsRawFd::as_raw_fd).collect();
        let registered = ring.submitter().register_files(&files);
        registered.expect("a table of files");
    }
    // By receiving socket: what waits to be sent on, oldest first; the first one is being sent.
    let mut waiting: Vec<VecDeque<(u16, u32)>> = vec![VecDeque::new(); sockets.len()];
    let receive = |from: usize| {
        let entry = match named {
            Named::Plain => opcode::RecvMulti::new(plain(from), GROUP).build(),
            Named::Direct => opcode::RecvMulti::new(direct(from), GROUP).build(),
        };
        entry.user_data(from as u64)
    };
    let send = |from: usize, bytes: *const u8, count: u32| {
        const FLAGS: i32 = libc::MSG_WAITALL | libc::MSG_NOSIGNAL;
        let to = from ^ 1;
        let entry = match named {
            Named::Plain => opcode::Send::new(plain(to), bytes, count)
                .flags(FLAGS)
                .build(),
            Named::Direct => opcode::Send::new(direct(to), bytes, count)
                .flags(FLAGS)
                .build(),
        };
        entry.user_data(from as u64 | SEND)
    };
    for from in 0..sockets.len() {
        push(&mut ring, &receive(from));
    }
    let mut completions = Vec::new();
    loop {
        calls.fetch_add(1, Ordering::Relaxed);
        ring.submit_and_wait(1).expect("the ring works");
        completions.extend(ring.completion());
        for completion in completions.drain(..) {
            let from = usize::try_from(completion.user_data() & (SEND - 1)).expect("an index");
            let is_sent = completion.user_data() & SEND != 0;
            if is_sent {
                let (id, _len) = waiting[from].pop_front().expect("one is being sent");
                pool.give(id);
            } else {
                match (
                    cqueue::buffer_select(completion.flags()),
                    completion.result(),
                ) {
                    (Some(id), count @ 1..) => {
                        waiting[from].push_back((id, count.cast_unsigned()));
                        if !cqueue::more(completion.flags()) {
                            push(&mut ring, &receive(from));
                        }
                        if waiting[from].len() > 1 {
                            continue;
                        }
                    }
                    (_, result) if result == -libc::ENOBUFS => {
                        push(&mut ring, &receive(from));
                        continue;
                    }
                    _ended => return,
                }
            }
            if let Some((id, count)) = waiting[from].front().copied() {
                push(&mut ring, &send(from, pool.at(id), count));
            }
        }
    }
}

pub(crate) fn push(ring: &mut IoUring, entry: &squeue::Entry) {
    if ring.submission().is_full() {
        ring.submit().expect("the ring works");
    }
    // SAFETY: sends name memory that is never freed and not touched before the send completed: buffers of the pool,
    // which are not given back, or those of `tls_legs`; receives name a registered group.
    let pushed = unsafe { ring.submission().push(entry) };
    pushed.expect("there is room");
}
