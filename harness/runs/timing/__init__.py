"""The timing stage: how long the steps of each policy take, and where their time goes."""
