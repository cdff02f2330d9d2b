//! Numbers and bytes that follow from a seed: both ends know what has to come, and a failure can be had again.

use std::io::{self, ErrorKind};
use std::ops::Range;
use std::sync::OnceLock;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// After so many bytes words begin again: a prime, so that no size of a block hides a shift.
const PERIOD: usize = 1_048_583;
/// Largest chunk, in bits.
const CHUNK_BITS: usize = 18;
const CHUNK_MAX: usize = 1 << CHUNK_BITS;

/// Numbers that look like chance (SplitMix64).
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

    /// Zero or more, and less than `limit`.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.number() % limit as u64).expect("less than a usize")
    }

    /// One to `2^bits`, small ones as often as large ones.
    pub(crate) fn size(&mut self, bits: usize) -> usize {
        let bits = self.below(bits + 1);
        1 + self.below(1 << bits)
    }
}

/// Sizes of what is written or read at once.
pub(crate) struct Chunks {
    random: Random,
    /// Small sizes come as often as large ones, up to so many bits; else each size as often as any other.
    bits: Option<usize>,
}

impl Chunks {
    /// Of up to `2^bits` bytes, and no more than 256 KiB.
    pub(crate) fn new(seed: u64, bits: usize) -> Self {
        Self {
            random: Random::new(seed),
            bits: Some(bits.min(CHUNK_BITS)),
        }
    }

    /// Of up to 256 KiB, half of that on average.
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

/// What one end says to the other: so many bytes, each of which follows from its place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Words {
    start: usize,
    pub(crate) bytes: usize,
}

/// What the other end has heard of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Heard {
    pub(crate) bytes: usize,
    /// They are the first ones of what was said.
    pub(crate) intact: bool,
    pub(crate) end: End,
}

/// What came behind the last byte.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum End {
    /// The other end says no more.
    InOrder,
    Failed(ErrorKind),
    /// Enough was heard.
    NotAwaited,
}

impl Words {
    /// Others than those of another seed, as far as a million bytes allow.
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

    /// Sends a part of them in chunks of random size.
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

    /// Reads to the end, or until `enough` bytes have come, in chunks of random size, and checks each.
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

/// The bytes of all words, made once: what is large is to cost its ends less than who carries it.
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
