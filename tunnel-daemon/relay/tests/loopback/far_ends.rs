//! The peers at one side of many pairs, in a separate process. A relay needs two descriptors per pair; with its peers in
//! the same process it would need four.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    process::{Child, Stdio},
    time::Duration,
};

use socket2::{SockRef, Socket};

use crate::support::{PATIENCE, raise_limit, receive_exactly, test_again};

/// Makes this program play the peers. The value holds the relay's port and the number of peers.
const ROLE: &str = "ADIT_RELAY_TEST_FAR_ENDS";

/// Connections made between two accept rounds of the relay's side: fewer than the listen backlog holds.
const BATCH: usize = 64;

/// Orders to the peers, which reply with the same byte when done. `CONNECT`: a batch of peers connects, and each sends
/// its number.
const CONNECT: u8 = b'c';
/// Each peer sends its number.
const SEND: u8 = b's';
/// Each peer receives its number.
const RECEIVE: u8 = b'r';

/// Handle to the peers' process. Dropping it kills that process, which resets all open connections.
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
        let process = test_again("far_ends::far_ends_execute_their_orders")
            .env(ROLE, format!("{port} {count}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        // The read timeout also limits `accept`.
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

    /// The relay's ends, each at the index of its peer's number.
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

/// The peers' process: returns at once unless started with [`ROLE`]. Ends when the order connection closes.
#[test]
fn far_ends_execute_their_orders() {
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
                    // Close with RST: so many sockets in TIME_WAIT would use up the ports of the next test.
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
