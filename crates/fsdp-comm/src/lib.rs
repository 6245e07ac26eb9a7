//! Process groups: collectives between ranks, with deadlines and one error for all.
