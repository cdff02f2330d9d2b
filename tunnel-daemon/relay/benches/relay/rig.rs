//! A relay, connections through it, and peers that push, ask and answer.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
};

use adit_relay::{
    Engine, Pair, Preference, Relay, RelayConfig, RelayHandle, Submitted, Thresholds, probe,
};
use socket2::{Domain, Socket, Type};

use crate::ring_copy::{self, Named};
use crate::tls_legs;

const MESSAGE: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    Tcp,
    Unix,
}

/// Who moves the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    Copy,
    Splice,
    /// The attempt of `ring_copy`, which is no part of the product.
    RingCopy,
    /// The same with direct descriptors.
    RingCopyDirect,
    /// The attempts of `tls_legs`, neither.
    Tls,
}

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    pub(crate) engine: Engine,
    pub(crate) by: By,
    pub(crate) transport: Transport,
}

impl Row {
    /// The rows of the product.
    pub(crate) fn all() -> Vec<Self> {
        Self::each(&[Transport::Tcp, Transport::Unix], &[By::Copy, By::Splice])
    }

    /// Lanes are TCP, so these are.
    pub(crate) fn tls() -> Vec<Self> {
        Self::each(&[Transport::Tcp], &[By::Tls])
    }

    fn each(transports: &[Transport], ways: &[By]) -> Vec<Self> {
        let mut rows = Vec::new();
        for &transport in transports {
            for &by in ways {
                for engine in [Engine::Epoll, Engine::IoUring] {
                    rows.push(Self {
                        engine,
                        by,
                        transport,
                    });
                }
            }
        }
        rows
    }

    /// Those, and the attempts.
    pub(crate) fn with_attempts() -> Vec<Self> {
        let mut rows = Self::all();
        for transport in [Transport::Tcp, Transport::Unix] {
            rows.extend([By::RingCopy, By::RingCopyDirect].map(|by| Self {
                engine: Engine::IoUring,
                by,
                transport,
            }));
        }
        rows
    }

    pub(crate) fn name(&self) -> String {
        format!("{:?}/{:?}/{}", self.transport, self.by, self.engine.name())
    }
}

pub(crate) struct Rig {
    _relay: Relay,
    pub(crate) handle: RelayHandle,
    transport: Transport,
    listener: TcpListener,
}

pub(crate) struct Tunnel {
    pub(crate) client: Socket,
    pub(crate) target: Socket,
    _submitted: Option<Submitted>,
}

impl Rig {
    pub(crate) fn start(row: Row) -> Self {
        let preference = match row.engine {
            Engine::Epoll => Preference::Epoll,
            Engine::IoUring => Preference::IoUring,
        };
        let mut config = RelayConfig::new(probe(preference).expect("this host allows both"));
        config.threads = 1;
        config.thresholds = match row.by {
            By::Splice => Thresholds::splice_at_once(),
            By::Copy | By::RingCopy | By::RingCopyDirect | By::Tls => Thresholds::copy_only(),
        };
        let relay = Relay::start(&config).expect("a relay starts");
        Self {
            handle: relay.handle(),
            _relay: relay,
            transport: row.transport,
            listener: TcpListener::bind(("127.0.0.1", 0)).expect("a free port"),
        }
    }

    fn sockets(&self) -> (Socket, Socket) {
        match self.transport {
            Transport::Tcp => {
                let address = self.listener.local_addr().expect("bound");
                let ours = TcpStream::connect(address).expect("connects");
                let (relays, _peer) = self.listener.accept().expect("accepts");
                for stream in [&ours, &relays] {
                    stream.set_nodelay(true).expect("a TCP option");
                }
                (ours.into(), relays.into())
            }
            Transport::Unix => {
                Socket::pair(Domain::UNIX, Type::STREAM, None).expect("a socket pair")
            }
        }
    }

    pub(crate) fn open(&self) -> Tunnel {
        let ((client, a), (target, b)) = (self.sockets(), self.sockets());
        let pair = Pair::new(a.into(), b.into());
        Tunnel {
            client,
            target,
            _submitted: Some(self.handle.submit(pair, Box::new(drop)).expect("room")),
        }
    }
}

/// Connections, and who relays them.
pub(crate) struct Opened {
    pub(crate) tunnels: Vec<Tunnel>,
    attempt: Option<(Arc<AtomicU64>, Vec<JoinHandle<()>>)>,
}

impl Rig {
    pub(crate) fn open_many(&self, row: Row, count: usize) -> Opened {
        if matches!(row.by, By::Copy | By::Splice) {
            return Opened {
                tunnels: (0..count).map(|_| self.open()).collect(),
                attempt: None,
            };
        }
        let mut relayed = Vec::new();
        let tunnels = (0..count)
            .map(|_| {
                let ((client, a), (target, b)) = (self.sockets(), self.sockets());
                relayed.extend([a, b]);
                Tunnel {
                    client,
                    target,
                    _submitted: None,
                }
            })
            .collect();
        let calls = Arc::new(AtomicU64::new(0));
        let threads = if row.by == By::Tls {
            let between = (0..count).map(|_| self.sockets()).collect();
            tls_legs::start(row.engine, relayed, between, &calls)
        } else {
            let named = match row.by {
                By::RingCopyDirect => Named::Direct,
                _ => Named::Plain,
            };
            vec![ring_copy::start(relayed, named, Arc::clone(&calls))]
        };
        Opened {
            tunnels,
            attempt: Some((calls, threads)),
        }
    }

    /// System calls of the one who relays.
    pub(crate) fn calls(&self, opened: &Opened) -> u64 {
        match &opened.attempt {
            Some((calls, _threads)) => calls.load(Ordering::Relaxed),
            None => self.handle.stats().syscalls,
        }
    }
}

impl Opened {
    /// Ends all connections and waits for an attempt to notice.
    pub(crate) fn close(self) {
        for tunnel in &self.tunnels {
            let _gone = tunnel.client.shutdown(Shutdown::Both);
        }
        drop(self.tunnels);
        if let Some((_calls, threads)) = self.attempt {
            for thread in threads {
                thread.join().expect("the attempt ends");
            }
        }
    }
}

/// Sends `bytes` through each tunnel at once and waits until all have arrived.
pub(crate) fn push(tunnels: &[Tunnel], bytes: usize) {
    thread::scope(|scope| {
        for tunnel in tunnels {
            scope.spawn(move || {
                let chunk = vec![1; 256 * 1024];
                let mut left = bytes;
                while left > 0 {
                    let count = left.min(chunk.len());
                    (&tunnel.client).write_all(&chunk[..count]).expect("sends");
                    left -= count;
                }
            });
            scope.spawn(move || {
                let mut chunk = vec![0; 256 * 1024];
                let mut left = bytes;
                while left > 0 {
                    left -= (&tunnel.target).read(&mut chunk).expect("receives");
                }
            });
        }
    });
}

/// Sends one message and waits for it to come back.
pub(crate) fn ask(tunnel: &Tunnel) {
    let mut message = [1; MESSAGE];
    (&tunnel.client).write_all(&message).expect("sends");
    (&tunnel.client).read_exact(&mut message).expect("receives");
}

/// Sends back what arrives, until the tunnel is dropped.
pub(crate) fn answer(tunnel: &Tunnel) -> Answering {
    let socket = tunnel.target.try_clone().expect("a descriptor");
    let ending = socket.try_clone().expect("a descriptor");
    let thread = thread::spawn(move || {
        let mut message = [0; MESSAGE];
        while (&socket).read_exact(&mut message).is_ok() {
            if (&socket).write_all(&message).is_err() {
                return;
            }
        }
    });
    Answering {
        ending,
        thread: Some(thread),
    }
}

/// Ends the answering thread when dropped.
pub(crate) struct Answering {
    ending: Socket,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Answering {
    fn drop(&mut self) {
        let _gone = self.ending.shutdown(Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _panicked = thread.join();
        }
    }
}
