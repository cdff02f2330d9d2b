//! A plain program without proxy settings, which connects and reports what it sees.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};

use super::namespace::Namespace;
use super::role::{Role, tell, told};

/// Timeout of connecting and of each read. A call to an unreachable address fails after it.
const LIMIT: Duration = Duration::from_secs(10);
const WORD: &[u8] = b"through and back";

/// What a client saw of one connection.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    /// Local address of the client's socket.
    pub(crate) local: SocketAddr,
    /// `getpeername`.
    pub(crate) peer: SocketAddr,
    /// The client's address as the target saw it.
    pub(crate) caller: SocketAddr,
}

impl Seen {
    /// Whether client and target were connected without a proxy.
    pub(crate) fn is_direct(&self) -> bool {
        self.caller == SocketAddr::new(self.local.ip().to_canonical(), self.local.port())
    }
}

/// A client process.
pub(crate) struct Client(Role);

impl Client {
    pub(crate) fn start(cgroup: Option<&Path>) -> Self {
        Self(Role::start("client", cgroup, ""))
    }

    /// Starts it in a new network namespace in which all interfaces are down.
    pub(crate) fn start_apart(cgroup: &Path) -> Self {
        let mut command = Command::new("unshare");
        command
            .arg("--net")
            .arg(std::env::current_exe().expect("this test"));
        Self(Role::start_by(command, "client", Some(cgroup), ""))
    }

    /// Starts it in another network namespace.
    pub(crate) fn start_in(namespace: &Namespace, cgroup: &Path) -> Self {
        let program = std::env::current_exe().expect("this test");
        let command = namespace.command(&program);
        Self(Role::start_by(command, "client", Some(cgroup), ""))
    }

    /// Process id.
    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    /// As [`Client::call`], from source port `port`.
    pub(crate) fn call_from(&mut self, port: u16, address: SocketAddr) -> Result<Seen, String> {
        self.ask(&port.to_string(), address)
    }

    /// Connects, sends a word and reads it back.
    pub(crate) fn call(&mut self, address: SocketAddr) -> Result<Seen, String> {
        self.ask("call", address)
    }

    /// Asserts that a call is captured, and that the client sees the address that it called.
    #[track_caller]
    pub(crate) fn is_captured(&mut self, address: SocketAddr) {
        let seen = self.call(address).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(seen.peer, address);
        assert!(!seen.is_direct(), "{seen:?}");
    }

    /// Asserts that a call fails with these words.
    #[track_caller]
    pub(crate) fn fails(&mut self, address: SocketAddr, words: &str) {
        let outcome = self.call(address);
        let fails = matches!(&outcome, Err(error) if error.contains(words));
        assert!(fails, "{outcome:?}");
    }

    /// Calls until a call goes direct, which must happen within a second.
    pub(crate) fn direct_within_a_second(&mut self, address: SocketAddr) {
        let (since, limit) = (Instant::now(), Duration::from_secs(1));
        while !self.call(address).is_ok_and(|seen| seen.is_direct()) {
            assert!(since.elapsed() < limit, "still captured");
        }
        assert!(since.elapsed() < limit, "{:?}", since.elapsed());
    }

    /// As [`Client::call`] to an IPv4 address, by an IPv6 socket.
    pub(crate) fn call_mapped(&mut self, address: SocketAddr) -> Result<Seen, String> {
        self.ask("mapped", address)
    }

    /// As [`Client::call`], by a Multipath TCP socket.
    pub(crate) fn call_mptcp(&mut self, address: SocketAddr) -> Result<Seen, String> {
        self.ask("mptcp", address)
    }

    /// Sends `bytes` bytes to an echoing target and shuts down writing. Returns the number of received bytes: the greeting
    /// and the echo.
    pub(crate) fn carry(&mut self, address: SocketAddr, bytes: usize) -> Result<usize, String> {
        self.0.say(&format!("carry {address} {bytes}"));
        let answer = self.0.hear();
        answer.parse().map_err(|_no_number| answer)
    }

    fn ask(&mut self, how: &str, address: SocketAddr) -> Result<Seen, String> {
        self.0.say(&format!("{how} {address}"));
        let answer = self.0.hear();
        let words: Vec<&str> = answer.split(' ').collect();
        match words[..] {
            ["seen", local, peer, caller] => Ok(Seen {
                local: local.parse().expect("an address"),
                peer: peer.parse().expect("an address"),
                caller: caller.parse().expect("an address"),
            }),
            _ => Err(answer),
        }
    }
}

/// Main loop of the client process.
pub(super) fn play() {
    while let Some(line) = told() {
        let (how, address) = line.split_once(' ').expect("a verb and an address");
        if let ("carry", Some((address, bytes))) = (how, address.split_once(' ')) {
            let bytes = bytes.parse().expect("a number");
            match carry(address.parse().expect("an address"), bytes) {
                Ok(received) => tell(&received.to_string()),
                Err(error) => tell(&format!("failed: {error}")),
            }
            continue;
        }
        let address: SocketAddr = address.parse().expect("an address");
        let called = match how.parse() {
            Ok(port) => call_from(port, address),
            Err(_no_port) if how == "mptcp" => call_mptcp(address),
            Err(_no_port) => call(how == "mapped", address),
        };
        match called {
            Ok(Seen {
                local,
                peer,
                caller,
            }) => tell(&format!("seen {local} {peer} {caller}")),
            Err(error) => tell(&format!("failed: {error}")),
        }
    }
}

fn carry(address: SocketAddr, bytes: usize) -> std::io::Result<usize> {
    let mut stream = TcpStream::connect_timeout(&address, LIMIT)?;
    stream.set_read_timeout(Some(LIMIT))?;
    let mut writing = stream.try_clone()?;
    // The pattern repeats after 251 bytes, so a missing or duplicated block is detected.
    let said: Vec<u8> = (0..=250).cycle().take(bytes).collect();
    let saying = said.clone();
    let sender = std::thread::spawn(move || {
        writing.write_all(&saying)?;
        writing.shutdown(std::net::Shutdown::Write)
    });
    let mut received = Vec::new();
    let outcome = stream.read_to_end(&mut received);
    sender.join().expect("it does not panic")?;
    let read = outcome?;
    let greeting = received.split_inclusive(|byte| *byte == b'\n').next();
    if received[greeting.map_or(0, <[u8]>::len)..] != said {
        return Err(std::io::Error::other("other bytes came back"));
    }
    Ok(read)
}

/// Connects once.
pub(crate) fn call(mapped: bool, address: SocketAddr) -> std::io::Result<Seen> {
    let called = match address.ip() {
        IpAddr::V4(v4) if mapped => SocketAddr::new(v4.to_ipv6_mapped().into(), address.port()),
        _ => address,
    };
    let socket = Socket::new(Domain::for_address(called), Type::STREAM, None)?;
    // The kernel gives odd ports to bound sockets and even ports to others. So an agent's connection to the same target
    // never has this port, which would look like a direct call.
    let any = if called.is_ipv4() {
        SocketAddr::from(([0, 0, 0, 0], 0))
    } else {
        SocketAddr::from(([0_u16; 8], 0))
    };
    socket.bind(&any.into())?;
    over(socket, called)
}

/// As [`call`], from source port `port`.
fn call_from(port: u16, address: SocketAddr) -> std::io::Result<Seen> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&SocketAddr::from(([0, 0, 0, 0], port)).into())?;
    over(socket, address)
}

/// As [`call`], by a Multipath TCP socket.
fn call_mptcp(address: SocketAddr) -> std::io::Result<Seen> {
    let domain = Domain::for_address(address);
    let socket = Socket::new(domain, Type::STREAM, Some(Protocol::MPTCP))?;
    over(socket, address)
}

/// As [`call`], with an existing socket.
pub(crate) fn over(socket: Socket, address: SocketAddr) -> std::io::Result<Seen> {
    socket.connect_timeout(&address.into(), LIMIT)?;
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(LIMIT))?;
    let (local, peer) = (stream.local_addr()?, stream.peer_addr()?);
    let mut reader = BufReader::new(stream);
    let mut greeting = String::new();
    reader.read_line(&mut greeting)?;
    let caller = greeting
        .trim_end()
        .parse()
        .map_err(|_no_address| std::io::Error::other(format!("greeted with {greeting:?}")))?;
    reader.get_mut().write_all(WORD)?;
    let mut back = [0; WORD.len()];
    reader.read_exact(&mut back)?;
    assert_eq!(back, WORD);
    Ok(Seen {
        local,
        peer,
        caller,
    })
}
