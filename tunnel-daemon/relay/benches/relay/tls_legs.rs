//! Pairs of which one leg is TLS, relayed by readiness and by a ring with multishot receives into provided buffers and
//! sends gathered into the call that waits. Two relays in a row, so that clients and targets stay plain: the first is the
//! TLS client of the second, and each has a thread. Both ways drive rustls alike; they differ in how bytes come from the
//! kernel and go back. A measurement, not part of the product: no half-close, no errors, no turns.

use std::{
    collections::VecDeque,
    io::{self, ErrorKind, Read, Write},
    mem::ManuallyDrop,
    os::fd::AsRawFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
};

use adit_relay::Engine;
use io_uring::{cqueue, opcode, types::Fd};
use rustix::{
    buffer::spare_capacity,
    event::epoll::{self, CreateFlags, EventData, EventFlags},
    io::Errno,
};
use rustls::{
    ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection,
    crypto::{
        CryptoProvider,
        aws_lc_rs::{self, cipher_suite::TLS13_AES_128_GCM_SHA256},
    },
    pki_types::{PrivatePkcs8KeyDer, ServerName},
    version::TLS13,
};
use socket2::Socket;

use crate::ring_copy::{self, BUFFERS, GROUP, Pool, SEND};

const NAME: &str = "localhost";
/// The side of a pair that is plain; the other one is TLS. Socket `2n + side` is that side of pair `n`.
const PLAIN: usize = 0;
/// Read at once by readiness, into a buffer that all connections share: as much as the lanes of the daemon read.
const READ: usize = 64 * 1024;
/// Events taken at once, as by the epoll driver.
const EVENTS: usize = 256;

/// One pair on one of the two threads.
struct Legs {
    sockets: [Socket; 2],
    session: Connection,
}

impl Legs {
    /// Appends to `out` what bytes that came from one side are on the other.
    fn pass(&mut self, from: usize, mut bytes: &[u8], out: &mut Vec<u8>) {
        if from == PLAIN {
            let mut writer = self.session.writer();
            writer.write_all(bytes).expect("it has no limit");
            write_session(&mut self.session, out);
            return;
        }
        while !bytes.is_empty() {
            let plain = read_session(&mut self.session, &mut bytes);
            let start = out.len();
            out.resize(start + plain, 0);
            let mut reader = self.session.reader();
            reader.read_exact(&mut out[start..]).expect("it is there");
        }
    }
}

/// Takes all records that the session has to send.
fn write_session(session: &mut Connection, out: &mut Vec<u8>) {
    while session.wants_write() {
        session.write_tls(out).expect("memory takes all");
    }
}

/// Gives the session a part of `bytes`; says how much can be read from it now.
fn read_session(session: &mut Connection, bytes: &mut &[u8]) -> usize {
    session.read_tls(bytes).expect("room for a record");
    let state = session.process_new_packets().expect("genuine records");
    state.plaintext_bytes_to_read()
}

/// Relays until the first socket ends. `ends` are the sockets of clients and targets in turn, `between` those of the
/// connections from the first relay to the second. `calls` counts entries into the kernel, of both threads.
pub(crate) fn start(
    engine: Engine,
    ends: Vec<Socket>,
    between: Vec<(Socket, Socket)>,
    calls: &Arc<AtomicU64>,
) -> Vec<JoinHandle<()>> {
    let (client, server) = configurations();
    let (mut near, mut far) = (Vec::new(), Vec::new());
    let mut ends = ends.into_iter();
    for (from, to) in between {
        let (client, server) = handshake(&client, &server);
        let mut next = || ends.next().expect("two for each pair");
        near.push(Legs {
            sockets: [next(), from],
            session: client,
        });
        far.push(Legs {
            sockets: [next(), to],
            session: server,
        });
    }
    [near, far]
        .map(|pairs| {
            let calls = Arc::clone(calls);
            thread::Builder::new()
                .name("relay-tls".to_owned())
                .spawn(move || match engine {
                    Engine::Epoll => by_readiness(pairs, &calls),
                    Engine::IoUring => by_multishot(pairs, &calls),
                })
                .expect("a thread")
        })
        .into()
}

/// With the suite that lanes agree on where the processor knows AES.
fn configurations() -> (Arc<ClientConfig>, Arc<ServerConfig>) {
    let provider = Arc::new(CryptoProvider {
        cipher_suites: vec![TLS13_AES_128_GCM_SHA256],
        ..aws_lc_rs::default_provider()
    });
    let own = rcgen::generate_simple_self_signed([NAME.to_owned()]).expect("a certificate");
    let key = PrivatePkcs8KeyDer::from(own.signing_key.serialize_der());
    let mut roots = RootCertStore::empty();
    roots.add(own.cert.der().clone()).expect("a root");
    let client = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&TLS13])
        .expect("a suite of TLS 1.3")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let mut server = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .expect("a suite of TLS 1.3")
        .with_no_client_auth()
        .with_single_cert(vec![own.cert.der().clone()], key.into())
        .expect("a certificate and its key");
    server.send_tls13_tickets = 0; // Nobody comes back.
    (Arc::new(client), Arc::new(server))
}

/// Two ends of a session. Its handshake happens in memory, so the sockets carry payload alone.
fn handshake(client: &Arc<ClientConfig>, server: &Arc<ServerConfig>) -> (Connection, Connection) {
    let name = ServerName::try_from(NAME).expect("a name");
    let client = ClientConnection::new(Arc::clone(client), name).expect("a client");
    let server = ServerConnection::new(Arc::clone(server)).expect("a server");
    let (mut client, mut server) = (Connection::Client(client), Connection::Server(server));
    while client.is_handshaking() || server.is_handshaking() {
        fly(&mut client, &mut server);
        fly(&mut server, &mut client);
    }
    for session in [&mut client, &mut server] {
        session.set_buffer_limit(None);
    }
    (client, server)
}

/// One flight of a handshake.
fn fly(from: &mut Connection, to: &mut Connection) {
    let mut flight = Vec::new();
    write_session(from, &mut flight);
    let mut left = flight.as_slice();
    while !left.is_empty() {
        let early = read_session(to, &mut left);
        assert_eq!(early, 0, "payload in a handshake");
    }
}

/// What one socket brings for the other.
#[derive(Default)]
struct Way {
    /// There may be more to read.
    is_readable: bool,
    out: Vec<u8>,
    sent: usize,
}

fn by_readiness(mut pairs: Vec<Legs>, calls: &AtomicU64) {
    let epoll = epoll::create(CreateFlags::CLOEXEC).expect("an epoll");
    // Room too: TCP reports it once it had run out, not after each read of the peer.
    let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
    for (number, socket) in pairs.iter().flat_map(|pair| &pair.sockets).enumerate() {
        socket.set_nonblocking(true).expect("a socket option");
        let data = EventData::new_u64(number as u64);
        epoll::add(&epoll, socket, data, flags).expect("room for a watch");
    }
    let mut ways: Vec<Way> = (0..2 * pairs.len()).map(|_| Way::default()).collect();
    let mut buffer = vec![0; READ];
    let mut events: Vec<epoll::Event> = Vec::with_capacity(EVENTS);
    loop {
        events.clear();
        calls.fetch_add(1, Ordering::Relaxed);
        if let Err(error) = epoll::wait(&epoll, spare_capacity(&mut events), None) {
            assert_eq!(error, Errno::INTR, "epoll works");
        }
        for event in &events {
            let (bits, flags) = (event.data.u64(), event.flags);
            if flags.intersects(EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR) {
                return;
            }
            let here = usize::try_from(bits).expect("an index");
            ways[here].is_readable |= flags.contains(EventFlags::IN);
            // Room here is for what the other one brings.
            for from in [here, here ^ 1] {
                let (pair, way) = (&mut pairs[from / 2], &mut ways[from]);
                if move_on(pair, from % 2, way, &mut buffer, calls).is_err() {
                    return;
                }
            }
        }
    }
}

/// Moves on what one side brings, until it has no more or the other side has no room.
fn move_on(
    pair: &mut Legs,
    from: usize,
    way: &mut Way,
    buffer: &mut [u8],
    calls: &AtomicU64,
) -> io::Result<()> {
    loop {
        while way.sent < way.out.len() {
            calls.fetch_add(1, Ordering::Relaxed);
            match pair.sockets[from ^ 1].write(&way.out[way.sent..]) {
                Ok(count) => way.sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        if !way.is_readable {
            return Ok(());
        }
        calls.fetch_add(1, Ordering::Relaxed);
        let count = match pair.sockets[from].read(buffer) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
            Err(error) => return Err(error),
        };
        // A short read took all: what comes later is an event of its own.
        way.is_readable = count == buffer.len();
        way.out.clear();
        way.sent = 0;
        pair.pass(from, &buffer[..count], &mut way.out);
    }
}

fn by_multishot(mut pairs: Vec<Legs>, calls: &AtomicU64) {
    let mut ring = ring_copy::ring();
    let mut pool = Pool::new(&ring);
    let all = pairs.iter().flat_map(|pair| &pair.sockets);
    let sockets: Vec<Fd> = all.map(|socket| Fd(socket.as_raw_fd())).collect();
    let receive = |from: usize| {
        opcode::RecvMulti::new(sockets[from], GROUP)
            .build()
            .user_data(from as u64)
    };
    for from in 0..sockets.len() {
        ring_copy::push(&mut ring, &receive(from));
    }
    // By the socket that brings them: pieces that wait until what came before is sent.
    let mut waiting: Vec<VecDeque<(u16, u32)>> = vec![VecDeque::new(); sockets.len()];
    // And what is being sent. Never freed: a ring is taken down at a time of the kernel's choosing.
    let mut sending = ManuallyDrop::new(vec![Vec::<u8>::new(); sockets.len()]);
    // Buffers that hold such pieces, and sockets that found no buffer.
    let (mut lent, mut starved) = (0, Vec::new());
    let (mut completions, mut touched) = (Vec::new(), Vec::new());
    loop {
        calls.fetch_add(1, Ordering::Relaxed);
        ring.submit_and_wait(1).expect("the ring works");
        completions.extend(ring.completion());
        for completion in completions.drain(..) {
            let from = usize::try_from(completion.user_data() & (SEND - 1)).expect("an index");
            let is_sent = completion.user_data() & SEND != 0;
            match (
                cqueue::buffer_select(completion.flags()),
                completion.result(),
            ) {
                (_, count) if is_sent => {
                    if usize::try_from(count) != Ok(sending[from].len()) {
                        return;
                    }
                    sending[from].clear();
                }
                (Some(id), count @ 1..) => {
                    waiting[from].push_back((id, count.cast_unsigned()));
                    lent += 1;
                    if !cqueue::more(completion.flags()) {
                        ring_copy::push(&mut ring, &receive(from));
                    }
                }
                (_, result) if result == -libc::ENOBUFS => starved.push(from),
                _ended => return,
            }
            touched.push(from);
        }
        for from in touched.drain(..) {
            let out = &mut sending[from];
            if !out.is_empty() {
                continue;
            }
            for (id, count) in waiting[from].drain(..) {
                pairs[from / 2].pass(from % 2, pool.bytes(id, count), out);
                pool.give(id);
                lent -= 1;
            }
            if out.is_empty() {
                continue; // Nothing came, or a part of a record.
            }
            let len = u32::try_from(out.len()).expect("no more than all buffers hold");
            let send = opcode::Send::new(sockets[from ^ 1], out.as_ptr(), len)
                .flags(libc::MSG_WAITALL | libc::MSG_NOSIGNAL)
                .build()
                .user_data(from as u64 | SEND);
            ring_copy::push(&mut ring, &send);
        }
        // Without a buffer it would fail again at once.
        if lent < BUFFERS {
            for from in starved.drain(..) {
                ring_copy::push(&mut ring, &receive(from));
            }
        }
    }
}
