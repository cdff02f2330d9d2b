//! Sockets of this process that its own redirect leaves alone, noted by their cookies before they connect.

use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, PoisonError, RwLock, Weak};

use rustix::net::sockopt::socket_cookie;

/// A redirect that leaves some sockets of its own process alone.
pub trait SocketExemptions: Send + Sync {
    /// Exempts the socket with this cookie: it connects where it asks to.
    ///
    /// # Errors
    /// The kernel cannot note the cookie.
    fn exempt(&self, cookie: u64) -> io::Result<()>;
}

type Known = RwLock<Option<Weak<dyn SocketExemptions>>>;

/// Lets sockets of this process bypass its own redirect, which may begin after they connect. Cheap to clone.
#[derive(Clone, Default)]
pub struct OwnSockets(Option<Arc<Known>>);

impl OwnSockets {
    /// Of a process that redirects nothing. Costs nothing.
    #[must_use]
    pub fn off() -> Self {
        Self(None)
    }

    /// Of a process that has a redirect, or will have one.
    #[must_use]
    pub fn on() -> Self {
        Self(Some(Arc::default()))
    }

    /// From now on sockets are noted for this redirect. When this returns, all sockets that were not noted have called
    /// connect, so rules may begin.
    pub fn spared_by(&self, redirect: &Arc<dyn SocketExemptions>) {
        if let Some(known) = &self.0 {
            *known.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::downgrade(redirect));
        }
    }

    /// The cookie of a socket, for [`Self::connecting`]; `None` where the process has no redirect.
    ///
    /// # Errors
    /// The descriptor is no socket.
    pub fn cookie(&self, socket: &impl AsFd) -> io::Result<Option<u64>> {
        match &self.0 {
            Some(_known) => Ok(Some(socket_cookie(socket)?)),
            None => Ok(None),
        }
    }

    /// Notes a socket, then runs `call`, which calls connect and must not block.
    ///
    /// # Errors
    /// The kernel cannot note the socket. `call` was not run: the connection might come back to this process.
    pub fn connecting<T>(&self, cookie: Option<u64>, call: impl FnOnce() -> T) -> io::Result<T> {
        let (Some(known), Some(cookie)) = (&self.0, cookie) else {
            return Ok(call());
        };
        // The lock is held over both steps: no redirect begins between them.
        let redirect = known.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(redirect) = redirect.as_ref().and_then(Weak::upgrade) {
            redirect.exempt(cookie)?;
        }
        Ok(call())
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn sockets_get_a_cookie_only_with_a_redirect() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        for (own, is_named) in [(OwnSockets::off(), false), (OwnSockets::on(), true)] {
            let cookie = own.cookie(&socket).unwrap();
            assert_eq!(cookie.is_some(), is_named);
            assert_eq!(own.connecting(cookie, || 7).unwrap(), 7);
        }
    }

    /// A redirect that began between the registration and the connect would not know the socket.
    #[test]
    fn no_redirect_begins_while_a_socket_connects() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let own = OwnSockets::on();
        let may_begin = || own.0.as_ref().unwrap().try_write().is_ok();
        let cookie = own.cookie(&socket).unwrap();
        assert!(!own.connecting(cookie, may_begin).unwrap());
        assert!(may_begin());
    }
}
