//! The tests, by who is put to the test.

mod agents;
mod connect;
mod end_to_end;
mod hostile_agents;
mod hostile_clients;
mod isolation;
mod stub_server;
mod upstream_suite;
