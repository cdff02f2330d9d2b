//! The agent listener: agent streams as links of the router.

mod admission;
mod announcements;
mod authorizer;
mod connection_links;
mod forwarding;
mod lanes;
mod link;
mod link_places;
mod node;
mod service;

pub use admission::AgentAuthenticator;
pub use announcements::{Announcements, changes};
pub use authorizer::{AgentAuthorizer, check_deny_list};
pub use forwarding::{Forwarding, failure};
pub use link::LinkSettings;
pub use node::{AgentDoors, DESTINATION_DIAL_TIMEOUT, Destinations, NodeProxy, NodeSettings};
pub use service::{AgentLinks, Backend, BackendSettings, PeerBackend};
