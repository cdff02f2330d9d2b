//! The listeners for clients, of a server and of `adit proxy`.

use std::path::PathBuf;
use std::time::Duration;

use adit_core::grant::ClientRules;

use super::admin_socket::AdminSocketPlan;
use super::parts::{ConnectPlan, TlsFiles, check_files};
use crate::address::BindAddress;
use crate::error::{ConfigError, bail};
use crate::limits;

/// The protocol of a frontend.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Dialect {
    /// `ProxyService/Proxy` over HTTP/2.
    Grpc,
    /// HTTP/1.1 CONNECT.
    HttpConnect,
    /// HTTP requests with a whole URL, and CONNECT.
    HttpProxy,
    /// SOCKS5.
    Socks5,
}

impl Dialect {
    const ALL: [Self; 4] = [Self::Grpc, Self::HttpConnect, Self::HttpProxy, Self::Socks5];

    /// The name in `--mode` and `--frontend`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Grpc => "grpc",
            Self::HttpConnect => "http-connect",
            Self::HttpProxy => "http-proxy",
            Self::Socks5 => "socks5",
        }
    }

    /// The dialect with that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dialect| dialect.name() == name)
    }

    /// The dialect with that name, if upstream has it.
    #[must_use]
    pub fn of_mode(name: &str) -> Option<Self> {
        Self::from_name(name).filter(|dialect| matches!(dialect, Self::Grpc | Self::HttpConnect))
    }

    /// All names, as in "grpc, http-connect or socks5".
    #[must_use]
    pub fn names() -> String {
        let [others @ .., last] = Self::ALL.map(Self::name);
        format!("{} or {last}", others.join(", "))
    }

    /// Programs of every kind speak it, so that a listener which is open to a network is an open proxy.
    #[must_use]
    pub fn is_for_anyone(self) -> bool {
        matches!(self, Self::HttpProxy | Self::Socks5)
    }
}

/// Where a frontend listens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FrontendListen {
    /// A unix socket, clear text: its file mode is the access control.
    Unix {
        /// At most [`limits::UNIX_SOCKET_PATH_BYTES_MAX`] bytes.
        path: PathBuf,
        /// Remove a stale file before listening.
        delete_existing: bool,
    },
    /// A TCP port.
    Tcp {
        /// Address to listen on.
        bind: BindAddress,
        /// TLS with required client certificates; `None` only with the explicit insecure flag.
        tls: Option<TlsFiles>,
    },
}

/// One listener for clients.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FrontendPlan {
    /// The listener's protocol.
    pub dialect: Dialect,
    /// The listening address.
    pub listen: FrontendListen,
}

impl FrontendPlan {
    /// Whether its clients are asked for user and password, if there are users.
    #[must_use]
    pub fn asks_for_users(&self) -> bool {
        let is_clear = matches!(self.listen, FrontendListen::Tcp { tls: None, .. });
        self.dialect.is_for_anyone() && is_clear
    }
}

/// All listeners for clients, and what clients may do there.
#[derive(Clone, PartialEq, Debug)]
pub struct ClientsPlan {
    /// The listeners.
    pub frontends: Vec<FrontendPlan>,
    /// Connections from elsewhere are closed before a byte is read, whatever address they came to.
    pub only_loopback: bool,
    /// Users of those frontends in clear text that any program can use; `None`: nobody is asked.
    pub users: Option<PathBuf>,
    /// Targets that clients may ask for; by default all, as upstream.
    pub rules: ClientRules,
    /// Time between HTTP/2 pings on gRPC frontends.
    pub keepalive: Duration,
    /// Limits on request heads, and on the time for a request.
    pub connect: ConnectPlan,
}

impl ClientsPlan {
    /// Checks them, and that the admin socket is none of them.
    pub(super) fn check(&self, admin_socket: &AdminSocketPlan) -> Result<(), ConfigError> {
        if self.frontends.len() > limits::FRONTENDS_MAX {
            let (count, max) = (self.frontends.len(), limits::FRONTENDS_MAX);
            bail!("{count} frontends are too many: at most {max}");
        }
        let mut paths: Vec<&PathBuf> = Vec::new();
        for frontend in &self.frontends {
            match &frontend.listen {
                FrontendListen::Unix { path, .. } => {
                    let bytes = path.as_os_str().len();
                    if bytes == 0 || bytes > limits::UNIX_SOCKET_PATH_BYTES_MAX {
                        bail!(
                            "unix socket path {path:?} has {bytes} bytes: it needs 1 to {}",
                            limits::UNIX_SOCKET_PATH_BYTES_MAX
                        );
                    }
                    if paths.contains(&path) {
                        bail!("two frontends listen on {}", path.display());
                    }
                    paths.push(path);
                }
                FrontendListen::Tcp {
                    bind,
                    tls: Some(tls),
                } => {
                    tls.check_files(["--server-cert", "--server-key", "--server-ca-cert"])?;
                    if tls.client_ca.is_none() {
                        bail!("frontend on {bind} would take any client: give --server-ca-cert");
                    }
                }
                FrontendListen::Tcp { bind, tls: None } => {
                    if frontend.dialect.is_for_anyone()
                        && !bind.is_loopback()
                        && !self.only_loopback
                        && self.users.is_none()
                    {
                        bail!(
                            "the {} frontend on {bind} would be an open proxy: let it listen on 127.0.0.1, [::1] or a unix \
                             socket, or give --server-cert, --server-key and --server-ca-cert, or --frontend-users",
                            frontend.dialect.name()
                        );
                    }
                }
            }
        }
        let asks = |frontend: &FrontendPlan| {
            matches!(frontend.listen, FrontendListen::Tcp { tls: Some(_), .. })
        };
        if self.rules.name_certificates() && !self.frontends.iter().any(asks) {
            // A security flag is never accepted without effect.
            bail!(
                "--client-allow-target with cn=, dns= or uri= goes by certificates of clients, and no frontend asks for one: give a \
                 frontend on TCP with --server-cert, --server-key and --server-ca-cert, or leave these names out"
            );
        }
        check_files([("--frontend-users", self.users.as_ref())])?;
        if self.users.is_some() && !self.frontends.iter().any(FrontendPlan::asks_for_users) {
            // A security flag is never accepted without effect.
            bail!(
                "--frontend-users is for socks5 and http-proxy frontends on TCP without TLS, and there is none: give one, or drop it"
            );
        }
        admin_socket.check()?;
        match admin_socket.given() {
            Some(path) if paths.iter().any(|taken| *taken == path) => {
                Err(ConfigError::new(format!(
                    "--admin-socket and a frontend want {}: give two paths",
                    path.display()
                )))
            }
            _ => Ok(()),
        }
    }

    /// The addresses of TCP frontends, for a check that listeners have one each.
    pub(super) fn binds(&self) -> impl Iterator<Item = (&'static str, &BindAddress)> {
        let listens = self.frontends.iter().map(|frontend| &frontend.listen);
        listens.filter_map(|listen| match listen {
            FrontendListen::Tcp { bind, .. } => Some(("a frontend", bind)),
            FrontendListen::Unix { .. } => None,
        })
    }

    /// The addresses that serve anyone who reaches them, in clear text.
    pub fn in_clear(&self) -> impl Iterator<Item = &BindAddress> {
        let listens = self.frontends.iter().map(|frontend| &frontend.listen);
        listens.filter_map(|listen| match listen {
            FrontendListen::Tcp { bind, tls: None } => Some(bind),
            _ => None,
        })
    }
}
