//! From the command line and the environment to a checked plan.
//!
//! [`parse`] reads either dialect: Adit's own flags (clap) or, as `proxy-server` / `proxy-agent` or with `--compat`, those of
//! upstream's programs. The result is a [`Command`] with a [`plan`], whose existence proves it consistent. The only I/O is
//! reading `--config` and checking that files exist. Nothing here logs: warnings are returned.
#![deny(unsafe_code)]

pub mod address;
mod command;
mod error;
mod files;
mod flags;
#[cfg(test)]
#[path = "../../generated_page.rs"]
mod generated_page;
mod identifiers;
mod legacy;
pub mod limits;
mod nearest;
mod node_interface;
mod parse;
mod pki;
pub mod plan;
mod process_id;
pub mod tls_policy;
mod units;
mod version;

#[cfg(feature = "demo")]
pub use command::DemoOptions;
pub use command::{
    CheckGiven, CheckOptions, Command, KubectlOptions, LinksAction, LinksOptions, ManOptions,
    NetnsHelperOptions, Parsed, StatusOptions, TopOptions, TopSort,
};
pub use error::ConfigError;
pub use flags::for_users;
pub use node_interface::{NodeInterfaceAddress, NodeInterfaceOptions};
pub use parse::{parse, parse_naming};
pub use pki::{PkiAgent, PkiClient, PkiInit, PkiOptions, PkiServer, PkiShow, PkiSigning};
