//! Interfaces and addresses of this network namespace over rtnetlink(7): as much of it as an interface of one's own needs.
//!
//! Own messages rather than a crate: seven kinds of requests, and the crates for rtnetlink bring an asynchronous client.

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netdevice, recv, send,
    socket_with,
};

use self::message::{Answer, Attributes, Message};

mod message;

// Numbers of linux/rtnetlink.h, linux/if_link.h and linux/if_addr.h.
const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_GETLINK: u16 = 18;
const RTM_SETLINK: u16 = 19;
const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
const IFLA_IFNAME: u16 = 3;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_IFALIAS: u16 = 20;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_F_NODAD: u8 = 2;
const IFF_UP: u32 = 1;
const RT_SCOPE_HOST: u8 = 254;
/// Length of `struct ifinfomsg`, and of `struct ifaddrmsg`.
const LINK_HEAD: usize = 16;
const ADDRESS_HEAD: usize = 8;
/// The kernel fills at most 32 KiB at once.
const ANSWER_MAX: usize = 64 * 1024;

/// An interface.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Link {
    /// Its number.
    pub index: u32,
    /// Its alias; empty if it has none.
    pub alias: String,
}

/// A connection to the kernel, for the network namespace of the thread that opened it.
#[derive(Debug)]
pub struct Rtnetlink {
    socket: OwnedFd,
    sequence: u32,
}

impl Rtnetlink {
    /// Opens a connection.
    ///
    /// # Errors
    /// The kernel, or a seccomp profile, refuses such sockets.
    pub fn open() -> io::Result<Self> {
        // Protocol 0 of the family is rtnetlink.
        let socket = socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            None,
        )?;
        Ok(Self {
            socket,
            sequence: 0,
        })
    }

    /// The interface of this name; `None` if there is none.
    ///
    /// # Errors
    /// The error of the kernel.
    pub fn link(&mut self, name: &str) -> io::Result<Option<Link>> {
        let message = Message::new(RTM_GETLINK, message::REQUEST, &link_head(0, 0));
        let mut found = None;
        let asked = self.ask(vec![message.with_text(IFLA_IFNAME, name)], |answer| {
            let index = answer.number(4)?;
            let alias = Attributes(answer.0.get(LINK_HEAD..)?);
            let alias = alias.of(IFLA_IFALIAS).map(text).unwrap_or_default();
            found = Some(Link { index, alias });
            Some(())
        });
        match asked {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::NODEV) => Ok(None),
            asked => asked.map(|()| found),
        }
    }

    /// Makes an interface of this kind, with an alias. Both requests are one system call: a process that is killed leaves no
    /// interface without its alias. The kernel sets the alias even if the interface exists, so callers look for it first;
    /// what appears in between has the same name for the same purpose.
    ///
    /// # Errors
    /// The interface exists, the kernel does not know the kind, or the privilege is missing.
    pub fn add_link(&mut self, kind: &str, name: &str, alias: &str) -> io::Result<()> {
        let flags = message::REQUEST | message::ACK;
        let new = flags | message::CREATE | message::EXCLUSIVE;
        let kind = message::attribute(IFLA_INFO_KIND, kind.as_bytes());
        let make = Message::new(RTM_NEWLINK, new, &link_head(0, 0))
            .with_text(IFLA_IFNAME, name)
            .with(IFLA_LINKINFO, &kind);
        let mark = Message::new(RTM_SETLINK, flags, &link_head(0, 0))
            .with_text(IFLA_IFNAME, name)
            .with(IFLA_IFALIAS, alias.as_bytes());
        self.ask(vec![make, mark], |_none| Some(()))
    }

    /// Removes an interface.
    ///
    /// # Errors
    /// The interface is gone or cannot be removed, or the privilege is missing.
    pub fn remove_link(&mut self, index: u32) -> io::Result<()> {
        let flags = message::REQUEST | message::ACK;
        let message = Message::new(RTM_DELLINK, flags, &link_head(index, 0));
        self.ask(vec![message], |_none| Some(()))
    }

    /// Sets an interface up and gives it an address of this host alone; both may be so already.
    ///
    /// # Errors
    /// The family is off, or the privilege is missing.
    pub fn set_up(&mut self, index: u32, address: IpAddr) -> io::Result<()> {
        let flags = message::REQUEST | message::ACK;
        let up = Message::new(RTM_SETLINK, flags, &link_head(index, IFF_UP));
        let given = flags | message::CREATE | message::REPLACE;
        let octets = octets(address);
        let mut head = [0; ADDRESS_HEAD];
        // Nobody else can have the address on this interface, so IPv6 need not look for a duplicate.
        head[..4].copy_from_slice(&[
            family(address),
            if address.is_ipv4() { 32 } else { 128 },
            IFA_F_NODAD,
            RT_SCOPE_HOST,
        ]);
        head[4..].copy_from_slice(&index.to_ne_bytes());
        let give = Message::new(RTM_NEWADDR, given, &head)
            .with(IFA_LOCAL, &octets)
            .with(IFA_ADDRESS, &octets);
        self.ask(vec![up, give], |_none| Some(()))
    }

    /// The numbers of interfaces that have this address.
    ///
    /// # Errors
    /// The error of the kernel.
    pub fn owners(&mut self, address: IpAddr) -> io::Result<Vec<u32>> {
        let mut head = [0; ADDRESS_HEAD];
        head[0] = family(address);
        let message = Message::new(RTM_GETADDR, message::REQUEST | message::DUMP, &head);
        let mut owners = Vec::new();
        self.ask(vec![message], |answer| {
            let attributes = Attributes(answer.0.get(ADDRESS_HEAD..)?);
            // With a peer, as on point-to-point interfaces, IFA_ADDRESS is the peer's.
            let own = attributes
                .of(IFA_LOCAL)
                .or_else(|| attributes.of(IFA_ADDRESS));
            if own == Some(octets(address).as_slice()) {
                owners.push(answer.number(4)?);
            }
            Some(())
        })?;
        Ok(owners)
    }

    /// The name of an interface.
    ///
    /// # Errors
    /// The interface is gone.
    pub fn name(&self, index: u32) -> io::Result<String> {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None)?;
        Ok(netdevice::index_to_name(socket, index)?)
    }

    /// Sends requests, and reads until each is acknowledged, answered or refused. `take` gets each answer; `None`: it is
    /// too short.
    fn ask(
        &mut self,
        messages: Vec<Message>,
        mut take: impl FnMut(Answer<'_>) -> Option<()>,
    ) -> io::Result<()> {
        let mut bytes = Vec::new();
        for message in messages {
            self.sequence += 1;
            bytes.extend(message.numbered(self.sequence));
        }
        send(&self.socket, &bytes, SendFlags::empty())?;
        let mut buffer = vec![0; ANSWER_MAX];
        let mut outcome = Ok(());
        loop {
            let (_filled, read) = recv(&self.socket, &mut buffer, RecvFlags::empty())?;
            let read = buffer.get(..read).ok_or_else(short)?;
            for part in message::parts(read) {
                let (sequence, part) = part.ok_or_else(short)?;
                // An older sequence number: a request before it has failed meanwhile.
                let is_last = sequence == self.sequence;
                match part {
                    message::Part::Answer { body, more } => {
                        take(body).ok_or_else(short)?;
                        if is_last && !more {
                            return outcome;
                        }
                    }
                    message::Part::End(error) => {
                        // The first error is the reason; what follows it may fail because of it.
                        if let (Some(errno), Ok(())) = (error, &outcome) {
                            outcome = Err(errno.into());
                        }
                        if is_last {
                            return outcome;
                        }
                    }
                }
            }
        }
    }
}

/// `struct ifinfomsg`; of the flags only "up" changes.
fn link_head(index: u32, flags: u32) -> [u8; LINK_HEAD] {
    let mut head = [0; LINK_HEAD];
    for (at, number) in [(4, index), (8, flags), (12, flags)] {
        head[at..at + 4].copy_from_slice(&number.to_ne_bytes());
    }
    head
}

fn family(address: IpAddr) -> u8 {
    let family = if address.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    // Families are small numbers.
    u8::try_from(family.as_raw()).unwrap_or_default()
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

/// The text of an attribute, which ends with a zero byte.
fn text(bytes: &[u8]) -> String {
    let bytes = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(bytes).into_owned()
}

fn short() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        "an answer of the kernel is too short",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_and_owners_of_addresses_are_found() {
        let mut kernel = Rtnetlink::open().unwrap();
        let loopback = kernel.link("lo").unwrap().unwrap();
        assert_eq!((loopback.index, loopback.alias.as_str()), (1, ""));
        assert_eq!(kernel.name(1).unwrap(), "lo");
        assert_eq!(kernel.link("no-such").unwrap(), None);
        assert_eq!(kernel.owners([127, 0, 0, 1].into()).unwrap(), [1]);
        assert!(kernel.owners([192, 0, 2, 10].into()).unwrap().is_empty());
    }

    #[test]
    fn the_first_error_of_several_requests_is_the_reason() {
        let mut kernel = Rtnetlink::open().unwrap();
        // A name of 16 bytes is too long, whoever asks.
        let error = kernel
            .add_link("dummy", "sixteen-bytes-00", "a")
            .unwrap_err();
        assert_ne!(Errno::from_io_error(&error), Some(Errno::NODEV), "{error}");
        // The connection is in step afterwards.
        assert!(kernel.link("lo").unwrap().is_some());
    }
}
