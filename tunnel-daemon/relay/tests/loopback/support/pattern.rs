//! Bytes that both ends can make for themselves, sent and received in chunks of random size.

use std::{
    io::{self, Read, Write},
    net::Shutdown,
};

use socket2::Socket;

/// Bytes that both ends can make for themselves.
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

    /// Between one and `max`.
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

/// Sends `bytes` in chunks of random size and ends the writing half.
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

/// Reads to the end in chunks of random size.
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
