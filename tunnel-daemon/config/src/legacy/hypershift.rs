//! The flags of HyperShift's two sidecars, `konnectivity-socks5-proxy` and `konnectivity-https-proxy`: subcommands of its
//! control-plane operator, each with a subcommand `run`.

use std::num::NonZeroU32;
use std::path::PathBuf;

use adit_core::grant::ClientRules;
use adit_kube::access::Source;
use ipnet::IpNet;
use uuid::Uuid;

use super::options::options;
use super::pflag::Flag;
use super::{help, pflag, usage};
use crate::address::{BindAddress, BindHost, ServerAddress};
use crate::command::{Command, Parsed};
use crate::error::{ConfigError, bail};
use crate::limits;
use crate::plan::{
    AdminSocketPlan, AgentTls, ClientsPlan, ConnectPlan, CustomerProxies, DataPathPlan, Dialect,
    DirectPlan, Drain, ForwardProxy, FrontendListen, FrontendPlan, GuestDns, Identity,
    IsolationPlan, LogPlan, NamesPlan, ProxyPlan, ProxySettings, Resolver, ShutdownPlan,
};
use crate::tls_policy::TlsPolicy;

/// Their names.
pub(crate) const SOCKS5: &str = "konnectivity-socks5-proxy";
pub(crate) const HTTPS: &str = "konnectivity-https-proxy";

/// One of the two programs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Sidecar {
    Socks5,
    Https,
}

impl Sidecar {
    /// The sidecar with this name.
    pub(crate) fn of_name(name: &str) -> Option<Self> {
        [Self::Socks5, Self::Https]
            .into_iter()
            .find(|sidecar| sidecar.name() == name)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Socks5 => SOCKS5,
            Self::Https => HTTPS,
        }
    }
}

options! {
    SharedOptions {
        host: Text("konnectivity-hostname", "host of the Konnectivity server") = "konnectivity-server-local";
        port: Uint("konnectivity-port", "its port for HTTP CONNECT") = 8090_u64;
        serving_port: Uint("serving-port", "port of this proxy") = 8090_u64;
        cloud_apis: Bool("connect-directly-to-cloud-apis", "reach APIs of AWS, Azure and IBM Cloud directly, or by the proxy of the environment");
        prefer_ipv4: Bool("prefer-ipv4", "try a name's IPv4 addresses first");
        // Adit's flag, which theirs do not have.
        direct_allow: Repeated("direct-allow", "a private network that connections past the tunnel may reach; repeatable");
        ca_cert: Text("ca-cert-path", "CA bundle of the server's certificate") = "/etc/konnectivity/proxy-ca/ca.crt";
        tls_cert: Text("tls-cert-path", "client certificate") = "/etc/konnectivity/proxy-client/tls.crt";
        tls_key: Text("tls-key-path", "key of --tls-cert-path") = "/etc/konnectivity/proxy-client/tls.key";
    }
}

options! {
    Socks5Options with shared: SharedOptions.flags {
        guest_dns: Bool("resolve-from-guest-cluster-dns", "resolve names by the DNS Service of the guest cluster, through the tunnel");
        management_dns: Bool("resolve-from-management-cluster-dns", "resolve names here where the guest cluster's DNS does not answer");
        no_resolver: Bool("disable-resolver", "leave names to the other end of the tunnel");
    }
}

options! {
    HttpsOptions with shared: SharedOptions.flags {
        http_proxy: Text("http-proxy", "proxy behind the tunnel for http:// requests");
        https_proxy: Text("https-proxy", "proxy behind the tunnel for CONNECT");
        no_proxy: Text("no-proxy", "hosts that need no such proxy");
    }
}

/// Reads the arguments behind the sidecar's name.
///
/// # Errors
/// A flag that the program refuses, or settings that cannot be used; exit code 1.
pub(crate) fn sidecar(
    sidecar: Sidecar,
    args: &[String],
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Parsed, ConfigError> {
    let (parsed, settings) = match sidecar {
        Sidecar::Socks5 => {
            let mut options = Socks5Options::default();
            let parsed = read(sidecar, &mut options.flags(), args)?;
            (parsed, options.settings(env))
        }
        Sidecar::Https => {
            let mut options = HttpsOptions::default();
            let parsed = read(sidecar, &mut options.flags(), args)?;
            (parsed, options.settings(env))
        }
    };
    match parsed {
        Some(usage) => Ok(usage),
        None => Ok(Parsed {
            command: Command::Proxy(Box::new(settings?)),
            warnings: Vec::new(),
        }),
    }
}

/// Fills the flags; returns the usage if that is asked for.
fn read(
    sidecar: Sidecar,
    flags: &mut [Flag<'_>],
    args: &[String],
) -> Result<Option<Parsed>, ConfigError> {
    let usage = usage::usage(&format!("{} run", sidecar.name()), flags);
    let outcome = pflag::parse(flags, &[], args).map_err(ConfigError::new)?;
    if outcome.help {
        let about = "A proxy beside a component of a hosted control plane, by Adit.";
        return Ok(Some(help(about, &usage)));
    }
    match outcome.positional.as_slice() {
        [] => Ok(None),
        [run] if run == "run" => Ok(None),
        [other, ..] => Err(ConfigError::new(format!(
            "unknown command {other:?} for {:?}: the one command is run",
            sidecar.name()
        ))),
    }
}

impl Socks5Options {
    fn settings(&self, env: &dyn Fn(&str) -> Option<String>) -> Result<ProxyPlan, ConfigError> {
        let names = if self.no_resolver {
            NamesPlan {
                prefer_ipv4: self.shared.prefer_ipv4,
                ..NamesPlan::default()
            }
        } else {
            NamesPlan {
                suffixes: Vec::new(),
                resolver: Resolver::Guest,
                services: Some(kubeconfig(env)?),
                guest_dns: self.guest_dns.then(GuestDns::of_openshift),
                unresolved: if self.guest_dns {
                    Resolver::Agent
                } else {
                    Resolver::Here
                },
                falls_back: self.guest_dns && self.management_dns,
                prefer_ipv4: self.shared.prefer_ipv4,
            }
        };
        let none = CustomerProxies::default();
        self.shared.settings(Dialect::Socks5, names, none, env)
    }
}

impl HttpsOptions {
    fn settings(&self, env: &dyn Fn(&str) -> Option<String>) -> Result<ProxyPlan, ConfigError> {
        let names = NamesPlan {
            suffixes: Vec::new(),
            resolver: Resolver::Guest,
            services: Some(kubeconfig(env)?),
            guest_dns: Some(GuestDns::of_openshift()),
            unresolved: Resolver::Here,
            falls_back: false,
            prefer_ipv4: self.shared.prefer_ipv4,
        };
        let customer = CustomerProxies::of_flags(
            ("--http-proxy", &self.http_proxy),
            ("--https-proxy", &self.https_proxy),
            &self.no_proxy,
            // As programs in Go have it.
            env("SSL_CERT_FILE")
                .filter(|path| !path.is_empty())
                .map(PathBuf::from),
        )?;
        self.shared
            .settings(Dialect::HttpProxy, names, customer, env)
    }
}

/// Access to the guest cluster's API. The file may come later.
fn kubeconfig(env: &dyn Fn(&str) -> Option<String>) -> Result<Source, ConfigError> {
    match env("KUBECONFIG").filter(|path| !path.is_empty()) {
        Some(path) => Ok(Source::Kubeconfig(PathBuf::from(path))),
        // In this pod it would be the API of the management cluster.
        None => Err(ConfigError::new(
            "KUBECONFIG is not set: it names the file with access to the guest cluster; socks5 does without by --disable-resolver",
        )),
    }
}

impl SharedOptions {
    fn direct_allowed(&self) -> Result<Vec<IpNet>, ConfigError> {
        let networks = self.direct_allow.iter().map(|text| {
            let network = text.parse();
            network.map_err(|_bad| {
                ConfigError::new(format!(
                    "--direct-allow {text:?} is no network: write 10.0.0.0/16"
                ))
            })
        });
        networks.collect()
    }

    /// Probes and metrics, where the environment asks for them: theirs have none, and the pod's ports may be taken.
    fn health(env: &dyn Fn(&str) -> Option<String>) -> Result<Option<BindAddress>, ConfigError> {
        let Some(text) = env(HEALTH_PORT).filter(|text| !text.is_empty()) else {
            return Ok(None);
        };
        let host = BindHost::Any;
        let port = text.parse().map_err(|_bad| {
            ConfigError::new(format!(
                "{HEALTH_PORT} {text:?} is no port: write 1 to 65535"
            ))
        })?;
        Ok(Some(BindAddress { host, port }))
    }

    fn settings(
        &self,
        dialect: Dialect,
        names: NamesPlan,
        customer: CustomerProxies,
        env: &dyn Fn(&str) -> Option<String>,
    ) -> Result<ProxyPlan, ConfigError> {
        let port = |flag: &str, port: u64| match u16::try_from(port) {
            Ok(port) if port > 0 => Ok(port),
            _ => Err(ConfigError::new(format!(
                "--{flag} {port} is no port: write 1 to 65535"
            ))),
        };
        if self.host.is_empty() {
            bail!("--konnectivity-hostname is empty: name the Konnectivity server");
        }
        let frontend = FrontendPlan {
            dialect,
            listen: FrontendListen::Tcp {
                bind: BindAddress {
                    host: BindHost::Any,
                    port: port("serving-port", self.serving_port)?,
                },
                tls: None,
            },
        };
        ProxySettings {
            id: Uuid::new_v4().to_string(),
            clients: ClientsPlan {
                frontends: vec![frontend],
                // A startup probe of the pod calls its address.
                only_loopback: true,
                users: None,
                rules: ClientRules::default(),
                keepalive: limits::KEEPALIVE_TIME,
                connect: ConnectPlan::default(),
            },
            servers: vec![ServerAddress::Host {
                host: self.host.clone(),
                port: port("konnectivity-port", self.port)?,
            }],
            server_tls: AgentTls {
                ca_cert: PathBuf::from(&self.ca_cert),
                identity: Some(Identity {
                    cert: PathBuf::from(&self.tls_cert),
                    key: PathBuf::from(&self.tls_key),
                }),
                alpn: Vec::new(),
            },
            // Theirs connects to the server past every proxy.
            forward_proxy: ForwardProxy::default(),
            tls: TlsPolicy::default(),
            names,
            direct: DirectPlan {
                cloud_apis: self.cloud_apis,
                allowed: self.direct_allowed()?,
                proxy: ForwardProxy {
                    no_proxy: None,
                    ..ForwardProxy::from_env(env)
                },
            },
            customer,
            dial_timeout: limits::SIDECAR_DIAL_TIMEOUT,
            pending_dials_max: PENDING_DIALS,
            spare_connections: limits::SPARE_CONNECTIONS,
            health: Self::health(env)?,
            admin_socket: AdminSocketPlan::Off,
            quotes_servers: true,
            data_path: DataPathPlan::NONE,
            isolation: IsolationPlan::default(),
            shutdown: ShutdownPlan {
                drain: Drain::For(limits::SIDECAR_GRACE),
                second_signal_exit_code: 1,
            },
            log: LogPlan::default(),
            access_log_limit: limits::ACCESS_LOG_LIMIT,
        }
        .check()
    }
}

/// As the flag of `adit proxy`.
const HEALTH_PORT: &str = "ADIT_HEALTH_PORT";
const PENDING_DIALS: NonZeroU32 = NonZeroU32::new(limits::PROXY_PENDING_DIALS).expect("not zero");
