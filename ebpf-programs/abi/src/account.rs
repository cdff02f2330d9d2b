//! The record of a connection, and the conversion of the kernel's counts to payload.
//!
//! The kernel counts a SYN and a FIN as one byte each. So `bytes_acked` includes our SYN, if we connected, and our FIN once
//! the peer has acknowledged it; `bytes_received` includes the peer's FIN. An [`Account`] holds payload only.

/// Bytes of an [`Account`].
pub const ACCOUNT_BYTES: usize = 56;
/// Bytes of a [`Closed`].
pub const CLOSED_BYTES: usize = 72;
/// Interval at which the daemon reads the ring of ends without a wake-up, milliseconds.
pub const RING_READ_EVERY_MS: u64 = 100;

/// The connection is established: its counts are valid.
pub const FLAG_ESTABLISHED: u32 = 1;
/// We connected: `bytes_acked` includes our SYN.
pub const FLAG_CONNECTED: u32 = 2;

/// States of a TCP socket, with the kernel's numbers for eBPF programs.
const TCP_FIN_WAIT1: u32 = 4;
const TCP_FIN_WAIT2: u32 = 5;
const TCP_CLOSE_WAIT: u32 = 8;
const TCP_LAST_ACK: u32 = 9;
const TCP_CLOSING: u32 = 11;

/// A connection: its label class, and its counts so far.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// The daemon's number of this connection's label set.
    pub class: u32,
    /// [`FLAG_ESTABLISHED`], [`FLAG_CONNECTED`].
    pub flags: u32,
    /// When the connection was established, in nanoseconds of the monotonic clock.
    pub since_ns: u64,
    /// Payload bytes that the peer acknowledged.
    pub sent_bytes: u64,
    /// Payload bytes that arrived in order.
    pub received_bytes: u64,
    /// `bytes_received` when the peer acknowledged our FIN, plus one.
    pub half_closed_bytes: u64,
    /// Smoothed round-trip time in microseconds; 0: not measured.
    pub rtt_us: u32,
    /// Segments retransmitted.
    pub retransmits: u32,
    /// Segments sent, including retransmissions.
    pub segments_out: u32,
    /// Segments received.
    pub segments_in: u32,
}

const _: () = assert!(size_of::<Account>() == ACCOUNT_BYTES && align_of::<Account>() == 8);

/// A connection that has ended.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed {
    /// The socket's cookie.
    pub cookie: u64,
    /// When the connection ended, in nanoseconds of the monotonic clock.
    pub closed_ns: u64,
    /// Its final counts.
    pub account: Account,
}

const _: () = assert!(size_of::<Closed>() == CLOSED_BYTES && align_of::<Closed>() == 8);

/// The kernel's values of a socket.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    /// The socket's state; at its end the previous state.
    pub state: u32,
    /// Sequence space that the peer acknowledged, including SYN and FIN.
    pub bytes_acked: u64,
    /// Sequence space that arrived in order, including FIN.
    pub bytes_received: u64,
    /// The first unacknowledged sequence number.
    pub snd_una: u32,
    /// The next sequence number to send.
    pub snd_nxt: u32,
    /// Smoothed round-trip time in eighths of a microsecond, as in the kernel.
    pub srtt: u32,
    /// Segments retransmitted.
    pub retransmits: u32,
    /// Segments sent.
    pub segments_out: u32,
    /// Segments received.
    pub segments_in: u32,
}

impl Account {
    /// Updates the counts from the kernel's values.
    #[inline(always)]
    pub fn update(&mut self, reading: &Reading) {
        let syn = u64::from(self.flags & FLAG_CONNECTED != 0);
        let fin_sent = u64::from(our_fin_acknowledged(reading));
        let fin_received = u64::from(self.peers_fin_arrived(reading));
        self.sent_bytes = reading.bytes_acked.saturating_sub(syn + fin_sent);
        self.received_bytes = reading.bytes_received.saturating_sub(fin_received);
        self.rtt_us = reading.srtt >> 3;
        self.retransmits = reading.retransmits;
        self.segments_out = reading.segments_out;
        self.segments_in = reading.segments_in;
    }

    /// The peer acknowledged our FIN and may still send. If anything arrives from here on, its last byte is the peer's FIN.
    #[inline(always)]
    pub fn half_closed(&mut self, reading: &Reading) {
        self.half_closed_bytes = reading.bytes_received + 1;
    }

    /// Whether the last received byte was a FIN. A socket in FIN_WAIT2 may also close without the peer's FIN; normally no
    /// byte has arrived since then. If bytes arrived but no FIN followed, the count is one byte too small, for a connection
    /// that did not end regularly.
    #[inline(always)]
    fn peers_fin_arrived(&self, reading: &Reading) -> bool {
        match reading.state {
            TCP_CLOSE_WAIT | TCP_LAST_ACK | TCP_CLOSING => true,
            TCP_FIN_WAIT2 => reading.bytes_received >= self.half_closed_bytes,
            _ => false,
        }
    }
}

#[inline(always)]
fn our_fin_acknowledged(reading: &Reading) -> bool {
    match reading.state {
        TCP_FIN_WAIT2 => true,
        TCP_FIN_WAIT1 | TCP_CLOSING | TCP_LAST_ACK => reading.snd_una == reading.snd_nxt,
        _ => false,
    }
}

/// Entries that store when a connection was last updated: a power of two.
pub const LOOKS: u32 = 4096;
/// Time between updates of a connection, in units of 2^20 nanoseconds: 101 ms.
const LOOK_AGAIN_AFTER: u32 = 96;

/// The index of a connection among [`LOOKS`].
#[inline(always)]
#[must_use]
pub fn look_place(cookie: u64) -> u32 {
    low(cookie) % LOOKS
}

/// Whether to update a connection at a round-trip measurement; if so, returns the new value of its entry. A lookup and
/// update costs a twentieth of an echo, so a connection is updated at most ten times a second; its final counts are exact.
/// Two connections that share an entry are updated at each measurement.
#[inline(always)]
#[must_use]
pub fn look(place: u64, cookie: u64, now_ns: u64) -> Option<u64> {
    let (owner, then) = (low(place >> 32), low(place));
    let now = low(now_ns >> 20);
    let is_due = owner != low(cookie) || now.wrapping_sub(then) >= LOOK_AGAIN_AFTER;
    is_due.then_some(u64::from(low(cookie)) << 32 | u64::from(now))
}

#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the lower half is meant")]
fn low(word: u64) -> u32 {
    word as u32
}

/// Whether to wake the daemon to read the ring. The daemon also reads the ring every [`RING_READ_EVERY_MS`]
/// milliseconds; waking it at an eighth of the ring leaves time to react.
#[inline(always)]
#[must_use]
pub fn wakes(waiting_bytes: u64, ring_bytes: u64) -> bool {
    waiting_bytes >= ring_bytes / 8
}

/// The outcome of a connection's end event, counted per CPU in an array indexed by outcome.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseOutcome {
    /// Reported to the daemon.
    Told = 0,
    /// The ring buffer was full.
    RingFull = 1,
    /// The socket has no entry: it ended before the daemon registered it, or its entry was evicted.
    Unknown = 2,
}

/// Every outcome, in the order of the array, with its name in metrics.
pub const CLOSE_OUTCOMES: [(CloseOutcome, &str); 3] = [
    (CloseOutcome::Told, "told"),
    (CloseOutcome::RingFull, "ring_full"),
    (CloseOutcome::Unknown, "unknown"),
];

const _: () = {
    let mut at = 0;
    while at < CLOSE_OUTCOMES.len() {
        assert!(CLOSE_OUTCOMES[at].0 as usize == at);
        at += 1;
    }
};

impl Account {
    /// The bytes stored in the map.
    #[must_use]
    pub fn to_bytes(self) -> [u8; ACCOUNT_BYTES] {
        let mut bytes = [0; ACCOUNT_BYTES];
        let (words, rest) = bytes.split_at_mut(8);
        put(words, &[self.class.to_ne_bytes(), self.flags.to_ne_bytes()]);
        let (longs, words) = rest.split_at_mut(32);
        put(
            longs,
            &[
                self.since_ns.to_ne_bytes(),
                self.sent_bytes.to_ne_bytes(),
                self.received_bytes.to_ne_bytes(),
                self.half_closed_bytes.to_ne_bytes(),
            ],
        );
        put(
            words,
            &[
                self.rtt_us.to_ne_bytes(),
                self.retransmits.to_ne_bytes(),
                self.segments_out.to_ne_bytes(),
                self.segments_in.to_ne_bytes(),
            ],
        );
        bytes
    }

    /// Reads the bytes stored in the map.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; ACCOUNT_BYTES]) -> Self {
        Self {
            class: word(bytes, 0),
            flags: word(bytes, 4),
            since_ns: long(bytes, 8),
            sent_bytes: long(bytes, 16),
            received_bytes: long(bytes, 24),
            half_closed_bytes: long(bytes, 32),
            rtt_us: word(bytes, 40),
            retransmits: word(bytes, 44),
            segments_out: word(bytes, 48),
            segments_in: word(bytes, 52),
        }
    }
}

impl Closed {
    /// Reads the bytes of a ring buffer entry; `None` if the length is wrong.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        if bytes.len() != CLOSED_BYTES {
            return None;
        }
        let (head, account) = bytes.split_at(16);
        Some(Self {
            cookie: long(head, 0),
            closed_ns: long(head, 8),
            account: Account::from_bytes(account.try_into().ok()?),
        })
    }
}

fn put<const N: usize>(into: &mut [u8], values: &[[u8; N]]) {
    for (place, value) in into.chunks_exact_mut(N).zip(values) {
        place.copy_from_slice(value);
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_ne_bytes(word)
}

fn long(bytes: &[u8], at: usize) -> u64 {
    let mut long = [0; 8];
    long.copy_from_slice(&bytes[at..at + 8]);
    u64::from_ne_bytes(long)
}

#[cfg(test)]
mod tests;
