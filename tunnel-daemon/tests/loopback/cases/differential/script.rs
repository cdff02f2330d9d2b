//! What client and target do on a connection, direct or through a tunnel, and what each of them receives.

use std::cell::Cell;
use std::io::{self, ErrorKind};

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::Notify;

use crate::support::clients::Io;
use crate::support::seeded::{Chunks, End, Heard, Random, Words};

/// Largest size of a script that is not bulk, in bits.
const SIZE_BITS: usize = 20;
/// Least size of bulk. The relay may splice after 256 KiB.
const BULK_BYTES: usize = 2 << 20;
/// The largest chunk has at least 1/32 of all bytes, and fewer than `MORE_BITS` bits more than that.
const COUNT_BITS: usize = 5;
const MORE_BITS: usize = 10;

/// How the two directions of a connection end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ending {
    /// Each side ends when it has sent everything.
    BothAtOnce,
    /// The client ends first, with unread bytes of the target in flight and more sent after the client's FIN.
    ClientFirst,
    /// The same with client and target swapped.
    TargetFirst,
    /// The client sends RST midway.
    ClientResets,
    TargetResets,
}

impl Ending {
    const ALL: [Self; 5] = [
        Self::BothAtOnce,
        Self::ClientFirst,
        Self::TargetFirst,
        Self::ClientResets,
        Self::TargetResets,
    ];

    fn is_reset(self) -> bool {
        matches!(self, Self::ClientResets | Self::TargetResets)
    }
}

/// What one side does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    /// Sends and receives concurrently.
    AtOnce,
    /// Receives nothing before it has sent all bytes and FIN.
    EndsFirst,
    /// Sends this many bytes at once, and the rest after the other side's FIN.
    EndsLast(usize),
    /// Sends `says` bytes, receives `hears` bytes, and resets the connection.
    BreaksOff { says: usize, hears: usize },
    /// Sends all bytes and no FIN, because the other side resets the connection.
    IsCut,
}

/// All actions on one connection.
#[derive(Debug)]
pub(super) struct Script {
    /// Contains the seed, which reproduces the script.
    pub(super) name: String,
    seed: u64,
    is_bulk: bool,
    ending: Ending,
    /// The client uses TCP, where a reset is visible, and otherwise a unix socket.
    pub(super) by_tcp: bool,
    up: Words,
    down: Words,
    client: Part,
    target: Part,
}

impl Script {
    /// Up to 1 MiB each way, with all orders of magnitude equally likely.
    pub(super) fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let (up, down) = (random.size(SIZE_BITS), random.size(SIZE_BITS));
        Self {
            name: format!("script {seed}"),
            ..Self::of(random, seed, up, down)
        }
    }

    /// Enough bytes in large enough chunks that a relay may splice them.
    pub(super) fn bulk(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let [up, down] = [(); 2].map(|()| BULK_BYTES + random.below(BULK_BYTES));
        Self {
            name: format!("bulk script {seed}"),
            is_bulk: true,
            ..Self::of(random, seed, up, down)
        }
    }

    fn of(mut random: Random, seed: u64, up: usize, down: usize) -> Self {
        let number = usize::try_from(seed).expect("small");
        let ending = Ending::ALL[number % Ending::ALL.len()];
        let (up, down) = (Words::new(2 * seed, up), Words::new(2 * seed + 1, down));
        let mut some = |words: Words| 1 + random.below(words.bytes);
        let (client, target) = match ending {
            Ending::BothAtOnce => (Part::AtOnce, Part::AtOnce),
            Ending::ClientFirst => (Part::EndsFirst, Part::EndsLast(some(down) - 1)),
            Ending::TargetFirst => (Part::EndsLast(some(up) - 1), Part::EndsFirst),
            Ending::ClientResets => (
                Part::BreaksOff {
                    says: some(up),
                    hears: some(down),
                },
                Part::IsCut,
            ),
            Ending::TargetResets => (
                Part::IsCut,
                Part::BreaksOff {
                    says: some(down),
                    hears: some(up),
                },
            ),
        };
        Self {
            name: String::new(),
            seed,
            is_bulk: false,
            ending,
            by_tcp: ending.is_reset() || random.below(2) == 0,
            up,
            down,
            client,
            target,
        }
    }

    pub(super) fn is_reset(&self) -> bool {
        self.ending.is_reset()
    }

    /// Whether the client breaks off, and whether the target does.
    pub(super) fn breaks_off(&self) -> [bool; 2] {
        [Ending::ClientResets, Ending::TargetResets].map(|ending| ending == self.ending)
    }

    /// Plays both sides to the end.
    pub(super) async fn play(&self, client: impl Io, target: impl Io) -> Played {
        let speaker = |part, says, hears, seed| Speaker {
            part,
            says,
            hears,
            seed,
            is_bulk: self.is_bulk,
        };
        let at_client = speaker(self.client, self.up, self.down, 2 * self.seed);
        let at_target = speaker(self.target, self.down, self.up, 2 * self.seed + 1);
        let (client, target) = tokio::join!(at_client.play(client), at_target.play(target));
        Played { client, target }
    }

    /// Asserts what direct and tunnelled connections both guarantee.
    pub(super) fn assert_promised(&self, played: &Played, what: &str) {
        let what = format!("{what}: {played:?} of {self:?}");
        for (part, heard, words) in [
            (self.client, played.client.heard, self.down),
            (self.target, played.target.heard, self.up),
        ] {
            assert!(heard.intact, "{what}");
            match part {
                Part::BreaksOff { hears, .. } => assert_eq!(heard.bytes, hears, "{what}"),
                Part::IsCut => {
                    let reset = End::Failed(ErrorKind::ConnectionReset);
                    assert_eq!(heard.end, reset, "{what}");
                }
                Part::AtOnce | Part::EndsFirst | Part::EndsLast(_) => {
                    assert_eq!(
                        (heard.bytes, heard.end),
                        (words.bytes, End::InOrder),
                        "{what}"
                    );
                }
            }
        }
    }
}

/// What both sides of a script received.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct Played {
    client: Side,
    target: Side,
}

#[derive(PartialEq, Eq, Debug)]
struct Side {
    heard: Heard,
    /// Why sending failed, if it did.
    failed: Option<ErrorKind>,
}

/// A side of a script.
struct Speaker {
    part: Part,
    says: Words,
    hears: Words,
    seed: u64,
    is_bulk: bool,
}

impl Speaker {
    /// Chunk sizes: any size for bulk, otherwise such that `bytes` are at most some hundred chunks.
    fn chunks(&self, seed: u64, bytes: usize) -> Chunks {
        let seed = 2 * self.seed + seed;
        if self.is_bulk {
            return Chunks::large(seed);
        }
        let bits = usize::try_from(usize::BITS - bytes.leading_zeros()).expect("small");
        let more = Random::new(seed).below(MORE_BITS);
        Chunks::new(seed, bits.saturating_sub(COUNT_BITS) + more)
    }

    /// Plays this side to the end, then closes the connection.
    async fn play(self, io: impl Io) -> Side {
        let (mut read, mut write) = tokio::io::split(io);
        let (has_said, has_heard) = (Notify::new(), Notify::new());
        let failed = Cell::new(None);
        let speaking = async {
            let said = self.speak(&mut write, &has_heard).await;
            failed.set(said.err().map(|error| error.kind()));
            has_said.notify_one();
        };
        let hearing = async {
            if self.part == Part::EndsFirst {
                has_said.notified().await;
            }
            let mut heard = self.hear(&mut read).await;
            // The kernel reports a reset once. After a failed write has reported it, read returns EOF.
            let reset = ErrorKind::ConnectionReset;
            if heard.end == End::InOrder && failed.get() == Some(reset) {
                heard.end = End::Failed(reset);
            }
            has_heard.notify_one();
            heard
        };
        let ((), heard) = tokio::join!(speaking, hearing);
        let failed = failed.get();
        Side { heard, failed }
    }

    async fn speak(
        &self,
        write: &mut (impl AsyncWrite + Unpin),
        has_heard: &Notify,
    ) -> io::Result<()> {
        let (all, mut chunks) = (self.says.bytes, self.chunks(0, self.says.bytes));
        match self.part {
            Part::AtOnce | Part::EndsFirst => {
                self.says.say(0..all, write, &mut chunks).await?;
                write.shutdown().await
            }
            Part::EndsLast(at_once) => {
                self.says.say(0..at_once, write, &mut chunks).await?;
                has_heard.notified().await;
                self.says.say(at_once..all, write, &mut chunks).await?;
                write.shutdown().await
            }
            Part::BreaksOff { says, .. } => self.says.say(0..says, write, &mut chunks).await,
            Part::IsCut => self.says.say(0..all, write, &mut chunks).await,
        }
    }

    async fn hear(&self, read: &mut (impl AsyncRead + Unpin)) -> Heard {
        let enough = match self.part {
            Part::BreaksOff { hears, .. } => hears,
            _ => usize::MAX,
        };
        let mut chunks = self.chunks(1, self.hears.bytes);
        self.hears.hear(enough, read, &mut chunks).await
    }
}
