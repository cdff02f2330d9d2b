//! The object of the experiment, loaded, and sockets in its maps.

use std::net::TcpStream;

use adit_ebpf_abi::{GRANT_WORDS, Grant, MOVED_WORDS, Moved, ROUTE_WORDS, Route};
use aya::maps::{HashMap, MapData, SockMap};
use aya::programs::{SkMsg, SkSkb};
use aya::{Ebpf, EbpfLoader};
use socket2::SockRef;

use super::stream::accepted;

/// The committed object, as `cargo xtask ebpf` built it.
pub(crate) static EXPERIMENT: &[u8] =
    aya::include_bytes_aligned!("../../../../../ebpf-programs/prebuilt/adit-sockmap.o");

/// Creates the maps of an object and relocates its programs.
pub(crate) fn load(object: &[u8]) -> Ebpf {
    EbpfLoader::new().load(object).expect("privileged")
}

/// Both programs, attached to their maps for as long as this lives.
pub(crate) struct Sockmap {
    sources: SockMap<MapData>,
    sinks: SockMap<MapData>,
    writers: SockMap<MapData>,
    grants: HashMap<MapData, u64, [u64; GRANT_WORDS]>,
    moved: HashMap<MapData, u64, [u64; MOVED_WORDS]>,
    routes: HashMap<MapData, u32, [u64; ROUTE_WORDS]>,
    next: u32,
    _programs: Ebpf,
}

/// One direction that the kernel forwards.
pub(crate) struct Direction {
    cookie: u64,
    source: u32,
    sink: u32,
    /// As the program knows it.
    pub(crate) grant: Grant,
    /// What the sink's TCP had taken before.
    accepted_before: u64,
}

macro_rules! take {
    ($ebpf:expr, $name:literal, $kind:ident) => {
        $kind::try_from($ebpf.take_map($name).expect("a map of the object")).expect("of this kind")
    };
}

impl Sockmap {
    pub(crate) fn new() -> Self {
        let mut ebpf = load(EXPERIMENT);
        let sources: SockMap<MapData> = take!(ebpf, "SOCKMAP_SOURCES", SockMap);
        let writers: SockMap<MapData> = take!(ebpf, "SOCKMAP_WRITERS", SockMap);
        let verdict = ebpf.program_mut("adit_sockmap_verdict").expect("there");
        let verdict: &mut SkSkb = verdict.try_into().expect("of this kind");
        verdict.load().expect("it loads");
        verdict.attach(sources.fd()).expect("it attaches");
        let message = ebpf.program_mut("adit_sockmap_message").expect("there");
        let message: &mut SkMsg = message.try_into().expect("of this kind");
        message.load().expect("it loads");
        message.attach(writers.fd()).expect("it attaches");
        Self {
            sources,
            sinks: take!(ebpf, "SOCKMAP_SINKS", SockMap),
            writers,
            grants: take!(ebpf, "SOCKMAP_GRANTS", HashMap),
            moved: take!(ebpf, "SOCKMAP_MOVED", HashMap),
            routes: take!(ebpf, "SOCKMAP_ROUTES", HashMap),
            next: 0,
            _programs: ebpf,
        }
    }

    fn free(&mut self) -> u32 {
        self.next += 1;
        self.next - 1
    }

    /// From now on what `from` receives is sent by `to`, on these terms.
    pub(crate) fn join(&mut self, from: &TcpStream, to: &TcpStream, terms: Grant) -> Direction {
        let (sink, source) = (self.free(), self.free());
        let cookie = SockRef::from(from).cookie().expect("a socket");
        let accepted_before = accepted(to);
        self.sinks.set(sink, to, 0).expect("an open connection");
        let grant = Grant {
            peer: sink.into(),
            ..terms
        };
        let direction = Direction {
            cookie,
            source,
            sink,
            grant,
            accepted_before,
        };
        self.tell(&direction);
        self.moved
            .insert(cookie, [0; MOVED_WORDS], 0)
            .expect("room");
        // The last step, since bytes move from here on.
        self.sources
            .set(source, from, 0)
            .expect("an open connection");
        direction
    }

    /// Has the program know what the direction says.
    pub(crate) fn tell(&mut self, direction: &Direction) {
        let words = direction.grant.to_words();
        self.grants
            .insert(direction.cookie, words, 0)
            .expect("room");
    }

    /// What became of segments so far.
    pub(crate) fn moved(&self, direction: &Direction) -> Moved {
        Moved::from_words(self.moved.get(&direction.cookie, 0).expect("inserted"))
    }

    /// Takes the sending socket out.
    pub(crate) fn remove_sink(&mut self, direction: &Direction) {
        self.sinks.clear_index(&direction.sink).expect("it was in");
    }

    /// Takes the receiving socket out.
    pub(crate) fn remove_source(&mut self, direction: &Direction) {
        let source = &direction.source;
        self.sources.clear_index(source).expect("it was in");
    }

    /// Takes both sockets out; whether source and sink were still in.
    pub(crate) fn withdraw(&mut self, direction: &Direction) -> (bool, bool) {
        let source = self.sources.clear_index(&direction.source);
        let sink = self.sinks.clear_index(&direction.sink);
        (source.is_ok(), sink.is_ok())
    }

    /// From now on what is written to `from` appears at `to`: in what it receives, or in what it sends.
    pub(crate) fn route(&mut self, from: &TcpStream, to: &TcpStream, is_ingress: bool) {
        let (peer, own) = (self.free(), self.free());
        self.writers.set(peer, to, 0).expect("an open connection");
        let route = Route {
            peer: peer.into(),
            is_ingress: is_ingress.into(),
        };
        let port = from.local_addr().expect("connected").port();
        self.routes
            .insert(u32::from(port), route.to_words(), 0)
            .expect("room");
        self.writers.set(own, from, 0).expect("an open connection");
    }
}

impl Direction {
    /// Bytes that the sink's TCP has taken since the direction was joined, whoever gave them.
    pub(crate) fn accepted(&self, sink: &TcpStream) -> u64 {
        accepted(sink) - self.accepted_before
    }

    /// Of `moved`, what waits in the queue that nothing accounts for.
    pub(crate) fn queued(&self, moved: &Moved, sink: &TcpStream) -> u64 {
        let taken = self.accepted(sink) - self.grant.consumed_bytes;
        moved.forwarded_bytes - taken.min(moved.forwarded_bytes)
    }
}
