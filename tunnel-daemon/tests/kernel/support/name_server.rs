//! A name server whose answers are too long for UDP.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use hickory_resolver::proto::op::{Message, OpCode};
use hickory_resolver::proto::rr::{RData, Record, RecordType};

/// The port is fixed: `resolv.conf` cannot name one.
const PORT: u16 = 53;
/// Time to live of an answer, in seconds.
const TTL: u32 = 60;

/// Answers until the process ends. Over TCP all names resolve to one address; over UDP answers are truncated.
pub(crate) struct NameServer {
    /// Address of its listeners.
    pub(crate) at: SocketAddr,
    connections: Arc<AtomicUsize>,
}

impl NameServer {
    /// Starts it in the network namespace of this thread, in which the port is free.
    pub(crate) fn start(ip: &str, known: Ipv4Addr) -> Self {
        let udp = UdpSocket::bind((ip, PORT)).expect("a namespace of the test's own");
        let tcp = TcpListener::bind((ip, PORT)).expect("a namespace of the test's own");
        let at = tcp.local_addr().expect("bound");
        std::thread::spawn(move || {
            let mut question = [0; 1500];
            while let Ok((bytes, from)) = udp.recv_from(&mut question) {
                if let Some(too_long) = answer(&question[..bytes], None) {
                    let _gone = udp.send_to(&too_long, from);
                }
            }
        });
        let connections = Arc::<AtomicUsize>::default();
        let counted = Arc::clone(&connections);
        std::thread::spawn(move || {
            for stream in tcp.incoming() {
                let Ok(stream) = stream else { continue };
                counted.fetch_add(1, SeqCst);
                std::thread::spawn(move || {
                    let _asker_left = serve(stream, known);
                });
            }
        });
        Self { at, connections }
    }

    /// Number of TCP connections so far.
    pub(crate) fn connections(&self) -> usize {
        self.connections.load(SeqCst)
    }

    /// A command that runs the given program and arguments with this name server only. It mounts `etc`, which is created
    /// here, over `/etc`.
    pub(crate) fn asked_by(&self, program: &Path, etc: &Path) -> Command {
        fs::create_dir(etc).expect("a folder of the test's own");
        let conf = format!("nameserver {}\n", self.at.ip());
        fs::write(etc.join("resolv.conf"), conf).expect("a folder of the test's own");
        // Mounts the whole folder: `resolv.conf` may be missing, or a dangling symlink.
        let mounted = format!("mount -o bind {} /etc && exec \"$0\" \"$@\"", etc.display());
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &mounted]).arg(program);
        command
    }
}

/// Over TCP a length precedes each message.
fn serve(mut stream: TcpStream, known: Ipv4Addr) -> std::io::Result<()> {
    loop {
        let mut length = [0; 2];
        stream.read_exact(&mut length)?;
        let mut question = vec![0; usize::from(u16::from_be_bytes(length))];
        stream.read_exact(&mut question)?;
        let Some(answer) = answer(&question, Some(known)) else {
            return Ok(());
        };
        let length = u16::try_from(answer.len()).expect("one address is short");
        let mut message = length.to_be_bytes().to_vec();
        message.extend(answer);
        stream.write_all(&message)?;
    }
}

/// Answers any name with `known`, or sets the truncation flag if there is no address.
fn answer(question: &[u8], known: Option<Ipv4Addr>) -> Option<Vec<u8>> {
    let question = Message::from_vec(question).ok()?;
    let query = question.queries.first()?.clone();
    let mut answer = Message::response(question.metadata.id, OpCode::Query);
    answer.add_query(query.clone());
    match known {
        None => answer.metadata.truncation = true,
        Some(ip) if query.query_type() == RecordType::A => {
            let data = RData::A(ip.into());
            answer.add_answer(Record::from_rdata(query.name().clone(), TTL, data));
        }
        // Other record types get an empty answer.
        Some(_) => (),
    }
    answer.to_vec().ok()
}
