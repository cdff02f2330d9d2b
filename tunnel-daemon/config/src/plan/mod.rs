//! Checked plans: values whose existence proves that the configuration is consistent.
//!
//! Both command lines fill [`ServerSettings`], [`AgentSettings`] or [`ProxySettings`]. Only their `check` makes a plan, which is read-only.
//! Packages below the binary never read flags or the environment.

mod account;
mod admin_socket;
mod agent;
mod data_path;
mod frontends;
mod http_proxy;
mod leases;
mod names;
mod netns;
mod node;
mod parts;
mod peers;
mod proxy;
mod rule_file;
mod server;
mod tokens;
mod transparent;

pub use account::{AccountMode, AccountPlan};
pub use admin_socket::{AdminSocketChoice, AdminSocketPlan, Program};
pub use agent::{AgentPlan, AgentSettings, AgentTls};
pub use data_path::{DataPathPlan, LaneSecurity};
pub use frontends::{ClientsPlan, Dialect, FrontendListen, FrontendPlan};
pub use http_proxy::HttpProxy;
pub use leases::{CountPlan, CountSource, PublishPlan, count_source};
pub use names::{CustomerProxies, DNS_PORT, DirectPlan, GuestDns, NamesPlan, Resolver};
pub use netns::{NetnsChoice, NetnsPlan};
pub use node::{CapturedService, DestinationsPlan, NodeRedirectPlan, TargetListener};
pub use parts::{
    ConnectPlan, DialPlan, Drain, ForwardProxy, Identity, IsolationPlan, LogDestination, LogFormat,
    LogPlan, ShutdownPlan, TlsFiles,
};
pub use peers::{PeerAddress, PeersPlan, shared_authority};
pub(crate) use peers::{check_network, networks_of};
pub use proxy::{ProxyPlan, ProxySettings};
pub use rule_file::RuleFile;
pub use server::{AgentListenerPlan, AgentPort, ServerPlan, ServerSettings};
pub use tokens::{AgentProof, TokenPlan};
pub use transparent::{AgentCalls, OnFailure, RedirectPlan, RedirectTarget, TransparentPlan};
