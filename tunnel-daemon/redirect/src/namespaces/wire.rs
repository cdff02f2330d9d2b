//! Protocol between the daemon and its helper: packets of text on a unix socket, with sockets attached.
//!
//! The helper begins with `ready` or `refused WHY`. Then the daemon sends `look ID...`: the namespaces it has a listener
//! in, with `+6` behind those without an IPv6 listener. The helper answers for each namespace that exists: `have ID`; `more
//! ID` with a socket for IPv6; `new ID NAME` with its sockets; `fail NAME`, a tab, and why. The last packet is `done OVER
//! UNREADABLE whole`, or `cut` in place of `whole`. So the helper remembers nothing between two requests.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use adit_config::limits;

/// Longest packet: a request that names as many namespaces as there may be.
const PACKET_BYTES_MAX: usize = 8 * 1024;
/// Longest name or reason in a packet.
pub(super) const TEXT_BYTES_MAX: usize = 1024;
/// Sockets of one namespace: one for each family.
pub(super) const SOCKETS_MAX: usize = 2;
/// Suffix of a namespace whose listener is for IPv4 alone.
const WANTS_V6: &str = "+6";

/// A namespace that has a listener already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// Its inode.
    pub id: u64,
    /// IPv6 was missing when the namespace was opened.
    pub wants_v6: bool,
}

/// One packet of the helper.
#[derive(Debug)]
pub(super) enum Reply {
    Ready,
    Refused(String),
    Have(u64),
    More(u64, Vec<OwnedFd>),
    New(u64, String, Vec<OwnedFd>),
    Fail(String, String),
    Done {
        over: usize,
        unreadable: usize,
        is_cut: bool,
    },
}

/// Sends one packet.
pub(super) fn send(channel: impl AsFd, text: &str, sockets: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SOCKETS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !sockets.is_empty() && !control.push(SendAncillaryMessage::ScmRights(sockets)) {
        return Err(io::Error::other("too many sockets for one packet"));
    }
    let bytes = [IoSlice::new(text.as_bytes())];
    sendmsg(channel, &bytes, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The next packet; `None` at EOF.
pub(super) fn receive(channel: impl AsFd) -> io::Result<Option<(String, Vec<OwnedFd>)>> {
    let mut bytes = vec![0; PACKET_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SOCKETS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = loop {
        let mut into = [IoSliceMut::new(&mut bytes)];
        // With a timeout the kernel does not restart the call after a signal.
        match recvmsg(&channel, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => (),
            other => break other?,
        }
    };
    let mut sockets = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(found) = message {
            sockets.extend(found);
        }
    }
    // Descriptors ran out: a part of a namespace's sockets is useless.
    if got.flags.contains(ReturnFlags::CTRUNC) {
        sockets.clear();
    }
    if got.bytes == 0 {
        return Ok(None);
    }
    bytes.truncate(got.bytes);
    let text = String::from_utf8(bytes).map_err(io::Error::other)?;
    Ok(Some((text, sockets)))
}

/// The request.
pub(super) fn look(held: impl Iterator<Item = Asked>) -> String {
    let mut text = "look".to_owned();
    for Asked { id, wants_v6 } in held.take(limits::REDIRECT_NETNS_MAX) {
        let wanted = if wants_v6 { WANTS_V6 } else { "" };
        text.push_str(&format!(" {id}{wanted}"));
    }
    text
}

/// The namespaces that a request names; `None`: the text is no request.
pub(super) fn held(request: &str) -> Option<Vec<Asked>> {
    let rest = request.strip_prefix("look")?;
    let asked = |word: &str| {
        let wanting = word.strip_suffix(WANTS_V6);
        let id = wanting.unwrap_or(word).parse().ok()?;
        let wants_v6 = wanting.is_some();
        Some(Asked { id, wants_v6 })
    };
    rest.split_whitespace().map(asked).collect()
}

impl Reply {
    pub(super) fn parse(text: &str, sockets: Vec<OwnedFd>) -> Option<Self> {
        let (word, rest) = text.split_once(' ').unwrap_or((text, ""));
        Some(match word {
            "ready" => Self::Ready,
            "refused" => Self::Refused(rest.to_owned()),
            "have" => Self::Have(rest.parse().ok()?),
            "more" => Self::More(rest.parse().ok()?, sockets),
            "new" => {
                let (id, name) = rest.split_once(' ')?;
                Self::New(id.parse().ok()?, name.to_owned(), sockets)
            }
            "fail" => {
                let (name, why) = rest.split_once('\t')?;
                Self::Fail(name.to_owned(), why.to_owned())
            }
            "done" => {
                let (over, rest) = rest.split_once(' ')?;
                let (unreadable, look) = rest.split_once(' ')?;
                Self::Done {
                    over: over.parse().ok()?,
                    unreadable: unreadable.parse().ok()?,
                    is_cut: match look {
                        "cut" => true,
                        "whole" => false,
                        _ => return None,
                    },
                }
            }
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::net::TcpListener;

    #[test]
    fn sockets_travel_with_their_packet_and_packets_stay_apart() {
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let (one, other) = socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        send(&one, "new 7 /run/netns/a b", &[listener.as_fd()]).unwrap();
        send(&one, "done 0 3 cut", &[]).unwrap();
        drop((one, listener));
        let (text, sockets) = receive(&other).unwrap().unwrap();
        let Some(Reply::New(7, name, sockets)) = Reply::parse(&text, sockets) else {
            panic!("{text}");
        };
        assert_eq!(name, "/run/netns/a b");
        let [socket] = <[OwnedFd; 1]>::try_from(sockets).unwrap();
        assert_eq!(TcpListener::from(socket).local_addr().unwrap(), at);
        let (text, _none) = receive(&other).unwrap().unwrap();
        let done = Reply::parse(&text, Vec::new());
        let Some(Reply::Done {
            over: 0,
            unreadable: 3,
            is_cut: true,
        }) = done
        else {
            panic!("{text}");
        };
        assert!(receive(&other).unwrap().is_none());
    }

    /// Limit (redirect): Captured network namespaces besides the own one
    #[test]
    fn the_longest_request_is_one_packet() {
        let max = limits::REDIRECT_NETNS_MAX;
        let asked = Asked {
            id: u64::MAX,
            wants_v6: true,
        };
        let text = look(std::iter::repeat_n(asked, max + 1));
        assert!(text.len() <= PACKET_BYTES_MAX, "{}", text.len());
        assert_eq!(held(&text).unwrap(), vec![asked; max]);
        assert_eq!(held("look"), Some(Vec::new()));
        for request in [
            "look x",
            "look +6",
            "look 7+4",
            "look 7 +6",
            "open /etc/shadow",
        ] {
            assert_eq!(held(request), None, "{request}");
        }
    }

    #[test]
    fn requests_mark_namespaces_that_want_ipv6() {
        let both = [(7, false), (8, true)].map(|(id, wants_v6)| Asked { id, wants_v6 });
        let text = look(both.into_iter());
        assert_eq!(text, "look 7 8+6");
        assert_eq!(held(&text).expect("a request"), both);
        let more = Reply::parse("more 8", Vec::new());
        assert!(matches!(more, Some(Reply::More(8, _))), "{more:?}");
    }

    #[test]
    fn invalid_replies_are_rejected() {
        for text in [
            "",
            "new 1",
            "new x y",
            "fail a b",
            "done 1",
            "done 1 2",
            "done 1 2 3",
            "have",
            "more",
        ] {
            assert!(Reply::parse(text, Vec::new()).is_none(), "{text}");
        }
    }
}
