//! The agent listener: agent streams as links of the router.

mod admission;
mod authorizer;
mod connection_links;
mod lanes;
mod link;
mod link_places;
mod node;
mod service;

pub use admission::AgentAuthenticator;
pub use authorizer::{AgentAuthorizer, check_deny_list};
pub use link::LinkSettings;
pub use node::{DESTINATION_DIAL_TIMEOUT, Destinations, NodeProxy, NodeSettings};
pub use service::{Backend, BackendSettings};
