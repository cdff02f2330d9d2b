//! Numbers and bytes from a seed: both ends know the expected bytes, and failures are reproducible.

use std::io::{self, ErrorKind};
use std::ops::Range;
use std::sync::OnceLock;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// The bytes repeat after this many: a prime, so that no block size hides a shift.
const PERIOD: usize = 1_048_583;
/// Largest chunk, in bits.
const CHUNK_BITS: usize = 18;
const CHUNK_MAX: usize = 1 << CHUNK_BITS;

/// Pseudo-random numbers (SplitMix64).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number from zero to `limit`, exclusive.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.number() % limit as u64).expect("less than a usize")
    }

    /// A number from one to `2^bits`; small numbers are as frequent as large ones.
    pub(crate) fn size(&mut self, bits: usize) -> usize {
        let bits = self.below(bits + 1);
        1 + self.below(1 << bits)
    }
}

/// Sizes of single reads and writes.
pub(crate) struct Chunks {
    random: Random,
    /// Small sizes up to this many bits are as frequent as large ones. `None`: all sizes are equally frequent.
    bits: Option<usize>,
}

impl Chunks {
    /// Chunks of up to `2^bits` bytes, and at most 256 KiB.
    pub(crate) fn new(seed: u64, bits: usize) -> Self {
        Self {
            random: Random::new(seed),
            bits: Some(bits.min(CHUNK_BITS)),
        }
    }

    /// Chunks of up to 256 KiB, half of that on average.
    pub(crate) fn large(seed: u64) -> Self {
        Self {
            random: Random::new(seed),
            bits: None,
        }
    }

    fn size(&mut self) -> usize {
        match self.bits {
            Some(bits) => self.random.size(bits),
            None => 1 + self.random.below(CHUNK_MAX),
        }
    }
}

/// The bytes that one end sends, each of which follows from its position.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Words {
    start: usize,
    pub(crate) bytes: usize,
}

/// What the other end has received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Heard {
    pub(crate) bytes: usize,
    /// The bytes received are a prefix of the bytes sent.
    pub(crate) intact: bool,
    pub(crate) end: End,
}

/// What followed the last byte.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum End {
    /// The reader got EOF.
    InOrder,
    Failed(ErrorKind),
    /// The reader stopped, because enough bytes had arrived.
    NotAwaited,
}

impl Words {
    /// Bytes that differ from those of another seed, as far as a table of a million bytes allows.
    pub(crate) fn new(seed: u64, bytes: usize) -> Self {
        let start = Random::new(seed).below(PERIOD);
        Self { start, bytes }
    }

    /// The bytes from `at` on: `count`, or as many as there are.
    fn piece(self, at: usize, count: usize) -> &'static [u8] {
        let from = (self.start + at) % PERIOD;
        let count = count.min(self.bytes.saturating_sub(at));
        &table()[from..from + count]
    }

    /// Sends a part of the bytes in chunks of random size.
    pub(crate) async fn say(
        self,
        part: Range<usize>,
        write: &mut (impl AsyncWrite + Unpin),
        chunks: &mut Chunks,
    ) -> io::Result<()> {
        assert!(part.end <= self.bytes, "{part:?} of {self:?}");
        let mut at = part.start;
        while at < part.end {
            let piece = self.piece(at, chunks.size().min(part.end - at));
            write.write_all(piece).await?;
            at += piece.len();
        }
        write.flush().await
    }

    /// Reads to EOF, or until `enough` bytes have arrived, in chunks of random size, and checks each chunk.
    pub(crate) async fn hear(
        self,
        enough: usize,
        read: &mut (impl AsyncRead + Unpin),
        chunks: &mut Chunks,
    ) -> Heard {
        let (mut bytes, mut intact) = (0, true);
        let mut block = vec![0; CHUNK_MAX];
        let end = loop {
            if bytes == enough {
                break End::NotAwaited;
            }
            let most = chunks.size().min(enough - bytes);
            match read.read(&mut block[..most]).await {
                Ok(0) => break End::InOrder,
                Ok(count) => {
                    intact &= block[..count] == *self.piece(bytes, count);
                    bytes += count;
                }
                Err(error) => break End::Failed(error.kind()),
            }
        };
        Heard { bytes, intact, end }
    }
}

/// The table of all bytes, computed once: a large transfer must cost the test less than the program under test.
fn table() -> &'static [u8] {
    static TABLE: OnceLock<Vec<u8>> = OnceLock::new();
    TABLE.get_or_init(|| {
        let (mut random, mut bytes) = (Random::new(0), Vec::new());
        while bytes.len() < PERIOD {
            bytes.extend_from_slice(&random.number().to_le_bytes());
        }
        bytes.truncate(PERIOD);
        bytes.extend_from_within(..CHUNK_MAX);
        bytes
    })
}
