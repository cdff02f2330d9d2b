//! The peers at one side of many pairs, in a process of their own: a relay's process has two descriptors for each pair, and
//! with its peers it would have four.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    process::{Child, Stdio},
    time::Duration,
};

use socket2::{SockRef, Socket};

use crate::support::{PATIENCE, raise_limit, receive_exactly, test_again};

/// Asks this program to be peers: the port where their relay listens, and how many they are.
const ROLE: &str = "ADIT_RELAY_TEST_FAR_ENDS";

/// Connections made between two looks at the relay's side: fewer than a listener keeps waiting.
const BATCH: usize = 64;

/// What the peers are asked to do; they answer with the same once it is done. A batch of them connects, and each says its
/// number.
const CONNECT: u8 = b'c';
/// Each sends its number.
const SEND: u8 = b's';
/// Each receives its number.
const RECEIVE: u8 = b'r';

/// The peers, from the relay's process. When they are dropped their process is killed, which resets what is open.
pub(crate) struct FarEnds {
    process: Child,
    listener: TcpListener,
    orders: TcpStream,
    count: usize,
}

impl FarEnds {
    pub(crate) fn start(count: usize) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let process = test_again("far_ends::far_ends_do_as_they_are_told")
            .env(ROLE, format!("{port} {count}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        // Waiting for a connection has the limit of reading from one.
        SockRef::from(&listener)
            .set_read_timeout(Some(PATIENCE))
            .unwrap();
        let (orders, _peer) = listener.accept().unwrap();
        orders.set_read_timeout(Some(PATIENCE)).unwrap();
        Self {
            process,
            listener,
            orders,
            count,
        }
    }

    /// The relay's ends, each at the place of its peer's number.
    pub(crate) fn connect(&mut self) -> Vec<Socket> {
        let mut ours: Vec<Option<Socket>> = (0..self.count).map(|_| None).collect();
        for first in (0..self.count).step_by(BATCH) {
            self.order(CONNECT);
            for _ in first..self.count.min(first + BATCH) {
                let (stream, _peer) = self.listener.accept().unwrap();
                stream.set_nodelay(true).unwrap();
                let socket = Socket::from(stream);
                socket.set_read_timeout(Some(PATIENCE)).unwrap();
                let number = number_from(&socket);
                assert!(
                    ours[number].replace(socket).is_none(),
                    "{number} came twice"
                );
            }
            self.done(CONNECT);
        }
        ours.into_iter().map(Option::unwrap).collect()
    }

    pub(crate) fn all_send(&mut self) {
        self.order(SEND);
        self.done(SEND);
    }

    pub(crate) fn all_receive(&mut self) {
        self.order(RECEIVE);
        self.done(RECEIVE);
    }

    fn order(&mut self, order: u8) {
        self.orders.write_all(&[order]).unwrap();
    }

    fn done(&mut self, order: u8) {
        let mut answer = [0];
        let heard = self.orders.read_exact(&mut answer);
        heard.expect("they live, or have said why not");
        assert_eq!(answer, [order]);
    }
}

impl Drop for FarEnds {
    fn drop(&mut self) {
        let _ended_before = self.process.kill();
        let _reaped_before = self.process.wait();
    }
}

fn number_from(socket: &Socket) -> usize {
    let bytes = receive_exactly(socket, 4);
    u32::from_le_bytes(bytes.try_into().unwrap())
        .try_into()
        .unwrap()
}

/// The part of the peers: does nothing unless asked to. Ends with the one who asked.
#[test]
fn far_ends_do_as_they_are_told() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let (port, count) = role.split_once(' ').unwrap();
    let (port, count): (u16, usize) = (port.parse().unwrap(), count.parse().unwrap());
    let _limit = raise_limit();
    let mut orders = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let mut sockets: Vec<Socket> = Vec::new();
    let say = |mut socket: &Socket, number: usize| {
        let number = u32::try_from(number).unwrap();
        socket.write_all(&number.to_le_bytes()).unwrap();
    };
    let mut order = [0];
    while orders.read_exact(&mut order).is_ok() {
        match order {
            [CONNECT] => {
                for number in sockets.len()..count.min(sockets.len() + BATCH) {
                    let socket = Socket::from(TcpStream::connect(("127.0.0.1", port)).unwrap());
                    // So many that linger in the kernel would be in the way of the next test's.
                    socket.set_linger(Some(Duration::ZERO)).unwrap();
                    socket.set_read_timeout(Some(PATIENCE)).unwrap();
                    say(&socket, number);
                    sockets.push(socket);
                }
            }
            [SEND] => {
                for (number, socket) in sockets.iter().enumerate() {
                    say(socket, number);
                }
            }
            [RECEIVE] => {
                for (number, socket) in sockets.iter().enumerate() {
                    assert_eq!(number_from(socket), number);
                }
            }
            other => panic!("no order: {other:?}"),
        }
        orders.write_all(&order).unwrap();
    }
}
