//! Deterministic bytes for both ends, sent and received in chunks of random size.

use std::{
    io::{self, Read, Write},
    net::Shutdown,
};

use socket2::Socket;

/// A generator of deterministic bytes and numbers.
pub(crate) struct Pattern(u64);

impl Pattern {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn number(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number between one and `max`.
    pub(crate) fn up_to(&mut self, max: usize) -> usize {
        1 + usize::try_from(self.number() % max as u64).unwrap()
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(count + 8);
        while bytes.len() < count {
            bytes.extend_from_slice(&self.number().to_le_bytes());
        }
        bytes.truncate(count);
        bytes
    }
}

/// An endless stream whose bytes follow from their offsets. Generated once, so that a GiB of it costs the two ends less
/// than the relay.
pub(crate) struct Endless(Vec<u8>);

impl Endless {
    /// The stream repeats after this many bytes: a prime, so that no block size hides a shift.
    const PERIOD: usize = 1_048_583;
    /// Chunks have up to `2^CHUNK_BITS` bytes; small chunks are as frequent as large ones.
    const CHUNK_BITS: usize = 18;
    const CHUNK_MAX: usize = 1 << Self::CHUNK_BITS;

    pub(crate) fn new(seed: u64) -> Self {
        let mut bytes = Pattern::new(seed).bytes(Self::PERIOD);
        bytes.extend_from_within(..Self::CHUNK_MAX);
        Self(bytes)
    }

    fn piece(&self, at: usize, count: usize) -> &[u8] {
        let from = at % Self::PERIOD;
        &self.0[from..from + count]
    }

    fn chunk(sizes: &mut Pattern) -> usize {
        let bits = sizes.up_to(Self::CHUNK_BITS + 1) - 1;
        sizes.up_to(1 << bits)
    }

    /// Sends that many bytes in chunks of random size, then FIN.
    pub(crate) fn send(&self, mut socket: &Socket, bytes: usize, seed: u64) {
        let (mut sizes, mut at) = (Pattern::new(seed), 0);
        while at < bytes {
            let count = Self::chunk(&mut sizes).min(bytes - at);
            socket.write_all(self.piece(at, count)).unwrap();
            at += count;
        }
        socket.shutdown(Shutdown::Write).unwrap();
    }

    /// Reads to EOF in chunks of random size, and checks each chunk. Returns the number of bytes.
    pub(crate) fn receive(&self, mut socket: &Socket, seed: u64) -> usize {
        let (mut sizes, mut at) = (Pattern::new(seed), 0);
        let mut chunk = vec![0; Self::CHUNK_MAX];
        loop {
            let size = Self::chunk(&mut sizes);
            let count = socket.read(&mut chunk[..size]).unwrap();
            if count == 0 {
                return at;
            }
            let same = chunk[..count] == *self.piece(at, count);
            assert!(same, "{count} bytes from {at} on");
            at += count;
        }
    }
}

/// Sends `bytes` in chunks of random size, then FIN.
pub(crate) fn send_all(mut socket: &Socket, bytes: &[u8], chunk_max: usize, seed: u64) {
    let mut sizes = Pattern::new(seed);
    let mut rest = bytes;
    while !rest.is_empty() {
        let count = sizes.up_to(chunk_max).min(rest.len());
        socket.write_all(&rest[..count]).unwrap();
        rest = &rest[count..];
    }
    socket.shutdown(Shutdown::Write).unwrap();
}

/// Reads to EOF in chunks of random size.
pub(crate) fn receive_all(mut socket: &Socket, chunk_max: usize, seed: u64) -> io::Result<Vec<u8>> {
    let mut sizes = Pattern::new(seed);
    let mut all = Vec::new();
    let mut chunk = vec![0; chunk_max];
    loop {
        let size = sizes.up_to(chunk_max);
        match socket.read(&mut chunk[..size])? {
            0 => return Ok(all),
            count => all.extend_from_slice(&chunk[..count]),
        }
    }
}

pub(crate) fn receive_exactly(mut socket: &Socket, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    socket.read_exact(&mut bytes).unwrap();
    bytes
}
