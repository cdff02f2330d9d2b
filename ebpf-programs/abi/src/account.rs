//! What is noted of a connection, and which of the kernel's numbers are payload.
//!
//! The kernel counts a SYN and a FIN as one byte each. So `bytes_acked` holds our SYN, if we connected, and our FIN once the
//! peer acknowledged it; `bytes_received` holds the peer's FIN. What is noted here is payload only.

/// Bytes of an [`Account`].
pub const ACCOUNT_BYTES: usize = 56;
/// Bytes of a [`Closed`].
pub const CLOSED_BYTES: usize = 72;
/// How often the daemon reads the ring of ends without being woken, in milliseconds.
pub const RING_READ_EVERY_MS: u64 = 100;

/// The connection is established: its numbers mean something.
pub const FLAG_ESTABLISHED: u32 = 1;
/// We connected: our SYN is among the bytes that were acknowledged.
pub const FLAG_CONNECTED: u32 = 2;

/// States of a TCP socket, as the kernel numbers them for programs.
const TCP_FIN_WAIT1: u32 = 4;
const TCP_FIN_WAIT2: u32 = 5;
const TCP_CLOSE_WAIT: u32 = 8;
const TCP_LAST_ACK: u32 = 9;
const TCP_CLOSING: u32 = 11;

/// A connection: what the daemon says it is, and what was counted so far.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// The daemon's number for the labels of this connection.
    pub class: u32,
    /// [`FLAG_ESTABLISHED`], [`FLAG_CONNECTED`].
    pub flags: u32,
    /// When it was established, in nanoseconds of the monotonic clock.
    pub since_ns: u64,
    /// Payload bytes that the peer acknowledged.
    pub sent_bytes: u64,
    /// Payload bytes that arrived in order.
    pub received_bytes: u64,
    /// What the kernel had counted as received when the peer acknowledged our FIN; one more than received then.
    pub half_closed_bytes: u64,
    /// Smoothed round-trip time in microseconds; 0: none was measured.
    pub rtt_us: u32,
    /// Segments sent again.
    pub retransmits: u32,
    /// Segments sent, those sent again included.
    pub segments_out: u32,
    /// Segments received.
    pub segments_in: u32,
}

const _: () = assert!(size_of::<Account>() == ACCOUNT_BYTES && align_of::<Account>() == 8);

/// A connection that is over.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed {
    /// Its socket.
    pub cookie: u64,
    /// When it ended, in nanoseconds of the monotonic clock.
    pub closed_ns: u64,
    /// Its last numbers.
    pub account: Account,
}

const _: () = assert!(size_of::<Closed>() == CLOSED_BYTES && align_of::<Closed>() == 8);

/// What the kernel says of a socket.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    /// Its state; at the end, the state before.
    pub state: u32,
    /// Sequence space that the peer acknowledged, with SYN and FIN.
    pub bytes_acked: u64,
    /// Sequence space that arrived in order, with FIN.
    pub bytes_received: u64,
    /// The first byte that is not acknowledged.
    pub snd_una: u32,
    /// The next byte to send.
    pub snd_nxt: u32,
    /// Smoothed round-trip time as the kernel keeps it: in eighths of a microsecond.
    pub srtt: u32,
    /// Segments sent again.
    pub retransmits: u32,
    /// Segments sent.
    pub segments_out: u32,
    /// Segments received.
    pub segments_in: u32,
}

impl Account {
    /// Takes over what the kernel says now.
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

    /// The peer acknowledged our FIN and sends on: what arrives from here on ends with its FIN.
    #[inline(always)]
    pub fn half_closed(&mut self, reading: &Reading) {
        self.half_closed_bytes = reading.bytes_received + 1;
    }

    /// Whether the last byte that arrived was a FIN. A socket that closes before its peer's FIN goes from the same state to
    /// the same end; then nothing arrived since. If something did and no FIN followed it, one byte too few is counted, for a
    /// connection that was not ended in order.
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

/// Places that remember when a connection was last looked at: a power of two.
pub const LOOKS: u32 = 4096;
/// A connection is looked at again after so long, in nanoseconds divided by 2^20: 101 ms.
const LOOK_AGAIN_AFTER: u32 = 96;

/// The place of a connection among [`LOOKS`].
#[inline(always)]
#[must_use]
pub fn look_place(cookie: u64) -> u32 {
    low(cookie) % LOOKS
}

/// Whether a round-trip measurement is taken over, and what the connection's place holds then. To look up a connection and
/// write its numbers costs as much as a twentieth of an echo, so one that measures often is looked at ten times a second;
/// what it comes to is exact at its end. Two that share a place are looked at each time.
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

/// Whether the daemon is woken to read the ring: it reads it every [`RING_READ_EVERY_MS`] milliseconds by itself, and an
/// eighth of the ring leaves it the time to come.
#[inline(always)]
#[must_use]
pub fn wakes(waiting_bytes: u64, ring_bytes: u64) -> bool {
    waiting_bytes >= ring_bytes / 8
}

/// What becomes of the end of a connection, counted per CPU in an array whose index is the outcome.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseOutcome {
    /// Told to the daemon.
    Told = 0,
    /// The ring buffer was full.
    RingFull = 1,
    /// Nothing is known of the socket: it ended before the daemon said what it is, or its entry had to make room.
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
    /// As the map holds it.
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

    /// From the bytes of the map.
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
    /// From the bytes of the ring buffer; `None` if they are of another length.
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
